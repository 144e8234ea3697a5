"""The requests of clients, and the answers: `json_bodies.py` (JSON), `protobuf.py` (protobuf), `examples.py` (the data of a pass),
`request_numbers.py` (the number of a request that is refused)."""
