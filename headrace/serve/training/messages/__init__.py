"""What clients send and get: `bodies.py` (JSON), `wire.py` (protobuf), `examples.py` (the data of a pass)."""
