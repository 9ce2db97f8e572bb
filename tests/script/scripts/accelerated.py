"""A loop with accelerate, launched by it, on the CPU."""

from typing import Any

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = list(torch.randint(0, 64, (16, 16)))
    rows: Any = torch.utils.data.DataLoader(tokens, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    for batch in rows:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()


main()
