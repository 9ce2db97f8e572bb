"""A plain torch loop that waits for its data: each record takes its time, and no worker reads ahead."""

import time

import torch

SECONDS, STEPS = 0.03, 12


class SlowRows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(SECONDS)  # as a disk far away does
        return torch.full((8,), float(at))


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for rows in torch.utils.data.DataLoader(SlowRows(), batch_size=2):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
