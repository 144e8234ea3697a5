"""Weight sync over TCP. Read `tcp.py` (both ends), then `part_sender.py` (the trainer's end where its weights are split over ranks)."""
