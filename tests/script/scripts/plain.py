"""A plain torch loop over a model that no library knows, with a copying data loader."""

import sys

import torch


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((8,), float(at))


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for rows in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    if "fail" in sys.argv:
        raise RuntimeError("planted in the script")


if __name__ == "__main__":
    main()
