"""A small classifier of images, trained by Lightning. Nothing in it knows of stepscope.

python docs/examples/lightning_module.py
"""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32 * 8 * 8, 10)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))

    def training_step(self, batch, index):
        images, classes = batch
        loss = F.cross_entropy(self(images), classes)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
images = TensorDataset(torch.randn(2048, 3, 32, 32), torch.randint(10, (2048,)))
trainer = lightning.Trainer(
    max_steps=200, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(images, batch_size=32, shuffle=True))
