"""The smallest network in which autocast does all that it does: a product, a ReLU, a normalisation, a product.

Shape legend: B batch, I features in, O features out.
"""

from torch import Tensor, nn

HIDDEN = 10


class ToyModel(nn.Module):
    """fc2(ln(relu(fc1(x)))): (B, I) to logits (B, O)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, HIDDEN, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, out_features, bias=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x_BI))))
