"""The placement of weights, and of the work of a step, on devices and processes.

Read `port.py` (all that the rest of the trainer asks of it, one device, and what a rank publishes), `sharded.py` (ranks of torch's FSDP2),
`tensor_parallel.py` (layers and experts split by the model's own plans), `filling.py` (each rank reads its own part of the weights), `model_stages.py` and `staged.py` (a pipeline of stages, and its
schedule) and `rendezvous.py` (how ranks find each other).
"""
