"""A program of Lightning that starts its other ranks itself, with DDP over gloo. Rank 1 leaves at step 30.

usage: python lightning_ddp.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import lightning
import torch

FOLDER = Path(sys.argv[1])


def read_calibration():
    time.sleep(3600)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def training_step(self, batch, step):
        new = FOLDER / f"new-{self.global_rank}"
        new.write_text(str(os.getpid()))
        new.rename(FOLDER / f"pid-{self.global_rank}")
        if (self.global_rank, step) == (1, 30):
            read_calibration()
        return self.line(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.set_num_threads(1)
trainer = lightning.Trainer(accelerator="cpu", devices=3, strategy="ddp", logger=False, enable_checkpointing=False)
trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(1_000_000, 4), batch_size=4))
