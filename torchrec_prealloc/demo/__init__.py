"""Train a DLRM on MovieLens-100K three times, each with another way of copying its batches to the device.

`torchrec-prealloc demo` runs it. The modules, in the order in which they use one another:

- `movielens`: the files of MovieLens-100K, read into columns
- `samples`: features and labels of every rating, split by time
- `batches`: batches in the order that a seed gives, one share for each rank
- `model`: the sharded model, its optimizer and its first weights
- `process_group`: one process, or those that torchrun started
- `measure`: peaks of memory of one run
- `losses`: whether two runs had the same losses, bit for bit
- `train`: one run of one way
- `simulated`: the same ways on the simulator, for a demo without a GPU
- `compare`: all ways, one after another
- `report`: the table and its files
- `command`: the flags, and what runs when
"""
