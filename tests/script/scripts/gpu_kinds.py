"""The same small Llama trained on a GPU as people's scripts do; the first argument says in which way."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

STEPS, ROWS, LENGTH, VOCAB, RATE = 6, 4, 256, 8192, 1e-4


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def zero(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
    }


def arguments(**more: object) -> dict[str, object]:
    out = str(Path.cwd() / "out")
    base = {"output_dir": out, "per_device_train_batch_size": ROWS, "max_steps": STEPS, "learning_rate": RATE}
    return {
        **base,
        "bf16": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        **more,
    }


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def plain() -> None:
    built = model().cuda()
    optimizer = torch.optim.AdamW(built.parameters(), lr=RATE)
    for batch in torch.utils.data.DataLoader(rows(STEPS * ROWS), batch_size=ROWS):  # type: ignore[arg-type]
        optimizer.zero_grad()
        built(**{name: part.cuda() for name, part in batch.items()}).loss.backward()
        optimizer.step()


def loop(stage: int) -> None:
    import deepspeed

    built = model()
    engine, *_ = deepspeed.initialize(model=built, model_parameters=built.parameters(), config=zero(stage))
    for batch in torch.utils.data.DataLoader(rows(STEPS * ROWS), batch_size=ROWS):  # type: ignore[arg-type]
        engine.backward(engine(**{name: part.to(engine.device) for name, part in batch.items()}).loss)
        engine.step()


def trainer(stage: int | None) -> None:
    from transformers import Trainer, TrainingArguments

    made = TrainingArguments(**arguments(deepspeed=None if stage is None else zero(stage)))
    Trainer(model=model(), args=made, train_dataset=rows(STEPS * ROWS)).train()


def sft() -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(STEPS * ROWS)])
    config = SFTConfig(**arguments(max_length=LENGTH, dataset_kwargs={"skip_prepare_dataset": True}))
    SFTTrainer(model=model(), args=config, train_dataset=data, processing_class=tokenizer()).train()


def tokenizer() -> object:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {f"w{at}": at for at in range(2, VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    kind, *more = sys.argv[1:]
    stage = int(more[0]) if more else None
    if kind == "plain":
        plain()
    elif kind == "loop":
        loop(stage or 0)
    elif kind == "sft":
        sft()
    else:
        trainer(stage)


main()
