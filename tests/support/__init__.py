"""What tests share: `runs/` (runs and processes), `bus/` (hosts over a bus), `gateway/` (agents), and here models, servers and worlds."""
