"""A small Llama with random weights, trained by Hugging Face's Trainer. Nothing in it knows of stepscope.

python docs/examples/trainer.py
"""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class RandomTokens(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        tokens = torch.randint(512, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make():
    """The model and a batch, as `stepscope tune --module docs/examples/trainer.py:make` asks for them."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config), torch.utils.data.default_collate([RandomTokens()[index] for index in range(8)])


if __name__ == "__main__":
    arguments = TrainingArguments(
        output_dir="trainer-output", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=200,
        logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True, bf16=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    model, _ = make()
    Trainer(model=model, args=arguments, train_dataset=RandomTokens()).train()
