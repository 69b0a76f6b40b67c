"""What a trainer has already: a function that makes a batch, one that makes its model. See estimate_trainer.yaml."""

from __future__ import annotations

from typing import Any

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain

FEATURES, IDS, DENSE, WIDTH = ["user", "item", "history"], 30, 13, 16


def make_batch(rows: int) -> Batch:
    """A host batch; `estimate` pins it as a DataLoader does."""
    lengths = torch.randint(0, 2 * IDS, (len(FEATURES) * rows,), dtype=torch.int32)
    ids = torch.randint(0, 1000, (int(lengths.sum()),))
    return Batch(torch.rand(rows, DENSE), KeyedJaggedTensor(FEATURES, ids, lengths=lengths), torch.rand(rows))


def build(device: torch.device) -> Any:
    """The sharded model and its optimizer; a process group of one rank is there."""
    tables = [
        EmbeddingBagConfig(num_embeddings=1000, embedding_dim=WIDTH, name=f"t_{name}", feature_names=[name])
        for name in FEATURES
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DLRMTrain(DLRM(ebc, DENSE, [64, WIDTH], [64, 1], dense_device=device))
    sharded = DistributedModelParallel(model, device=device)
    return sharded, torch.optim.SGD([weight for weight in sharded.parameters() if weight.requires_grad], lr=0.1)
