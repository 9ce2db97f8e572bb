"""A plain torch loop whose ranks have their gradients from each other: they meet as their launcher says."""

import torch
import torch.distributed
from leaving import leave  # type: ignore[import-not-found]


def main() -> None:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
    leave()
