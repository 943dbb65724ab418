"""GRPO steps of TRL, timed. Run by benchmarks/grpo_step.py with the interpreter of TRL's own environment.

    python trl_grpo_step.py DIRECTORY NEW_TOKENS WARMUP STEPS [ROWS]

DIRECTORY holds the model, the tokenizer and prompts.json; ROWS are trained at once (default: all of a step); the last line printed is a JSON object of seconds.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset

GROUP_SIZE = 8


def main(directory: Path, new_tokens: int, warmup: int, steps: int, rows_at_once: int = 0) -> None:
    """Train for ``warmup + steps`` steps and print the seconds of each that counts."""
    transformers.logging.set_verbosity_error()
    prompts = json.loads((directory / "prompts.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows_of_step = len(prompts) * GROUP_SIZE
    rows_at_once = rows_at_once or rows_of_step
    config = trl.GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=rows_of_step // rows_at_once,
        num_generations=GROUP_SIZE,
        max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=warmup + steps,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    seconds: dict[str, list[float]] = {"step": [], "generate": []}
    lengths: list[int] = []

    def reward(completion_ids, **kwargs):
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            seconds["step"].append(time.perf_counter() - self.started)

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * (warmup + steps)}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    generate = trainer._generate_single_turn

    def timed_generate(*arguments, **keywords):
        started = time.perf_counter()
        result = generate(*arguments, **keywords)
        seconds["generate"].append(time.perf_counter() - started)
        return result

    trainer._generate_single_turn = timed_generate
    trainer.train()
    assert set(lengths) == {new_tokens}, f"completions of {sorted(set(lengths))} tokens, not {new_tokens}"
    rows = len(lengths) // len(seconds["generate"])
    result = {name: values[warmup:] for name, values in seconds.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        json.dumps(
            {
                **result,
                "rows": rows,
                "peak_gib": peak,
                "version": f"TRL {trl.__version__}, transformers {transformers.__version__}",
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
