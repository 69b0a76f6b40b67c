"""What batches cost of a device's memory, by running a pipeline for a few steps, on the simulator or on a GPU.

- `footprint`: the peaks of some steps, by stream; the columns in which they are shown
- `stand_in`: a model that reads any batch, and its optimizer
- `description`: batches made of a description: rows, ids of each feature, dense columns, other tensors
- `cuda_names`: for pipeline classes that name CUDA's streams whatever their device
- `estimate`: a pipeline class in the three ways of copying
- `config`: the YAML that names a pipeline, batches and, if wanted, a model
- `command`: `torchrec-prealloc estimate`
"""
