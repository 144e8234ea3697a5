"""The requests of clients, and the answers: `bodies.py` (JSON), `wire.py` (protobuf), `examples.py` (the data of a pass)."""
