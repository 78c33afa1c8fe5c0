# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that trains tiny models in children of its own and lets them be killed; test_resume.py starts it.

Forking after the imports costs them once. No child trains before another is forked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import set_seed

from deltalatent import KimiK3ForCausalLM
from deltalatent.training import QuantileBalancingCallback, balanced_routers, last_complete_checkpoint
from tests.testing_common import tiny_config

STEPS, SAVE_STEPS, ACCUMULATION = 6, 2, 2
KILLED_CHECKPOINT = "checkpoint-4"
DOCUMENTS = 20  # an epoch is five steps, so that the last step is in the second one


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def halved(write: Callable[..., Any], argument: int, name: str) -> Callable[..., Any]:
    """`write`, but dying when half of the checkpoint's file `name` is there. `argument`: which one is the path."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = write(*args, **kwargs)
        path = Path(args[argument]) if len(args) > argument and isinstance(args[argument], str | Path) else Path()
        if path.name == name and path.parent.name == KILLED_CHECKPOINT:
            os.truncate(path, path.stat().st_size // 2)
            die()
        return result

    return wrapped


def half_removed(folder: str, *args: Any, **kwargs: Any) -> None:
    (Path(folder) / "optimizer.pt").unlink()
    die()


class DieInStep(TrainerCallback):
    """Dies in the fourth step: between its micro-batches, or between its two halves, optimizer and schedule."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def _die_at(self, moment: str, state: TrainerState) -> None:
        if moment == self.moment and state.global_step == 3:
            die()

    def on_substep_end(self, args, state, control, **kwargs) -> None:
        self._die_at("between micro-batches", state)

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self._die_at("after the optimizer's step", state)


MOMENTS = ("between micro-batches", "after the optimizer's step")
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
KILLS = (*MOMENTS, *FILES, "deleting the old one")


def arm(kill: str) -> None:
    """Sets this process up to die at a moment of `KILLS` that is not one of the loop."""
    if kill == "model.safetensors":
        module = transformers.modeling_utils
        module.safe_save_file = halved(module.safe_save_file, 1, kill)
    elif kill == "trainer_state.json":
        TrainerState.save_to_json = halved(TrainerState.save_to_json, 1, kill)
    elif kill in FILES:
        torch.save = halved(torch.save, 1, kill)
    elif kill == "deleting the old one":
        shutil.rmtree = half_removed


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 19, (9,), generator=generator).tolist() for _ in range(DOCUMENTS)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(output: Path, kill: str | None, resume: bool) -> None:
    """Trains to the end, or to death; leaves everything that must be equal in `finished.pt`."""
    torch.set_num_threads(1)
    checkpoint = last_complete_checkpoint(output) if resume else None
    set_seed(1 if checkpoint is None else 2)  # nothing of a resumed run may depend on how its process began
    model = KimiK3ForCausalLM(tiny_config(initializer_range=0.1))
    args = TrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_steps=SAVE_STEPS,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    callbacks: list[TrainerCallback] = [QuantileBalancingCallback()]
    if kill is not None:
        callbacks.append(DieInStep(kill))
        arm(kill)
    trainer = Trainer(model, args, train_dataset=samples(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=checkpoint)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "histograms": [router.balance.counts for _, router in balanced_routers(model)],
            "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        },
        output / "finished.pt",
    )


def child(output: Path, kill: str | None, resume: bool) -> int:
    """Starts a training process; returns its id."""
    process = os.fork()
    if process == 0:
        try:
            train(output, kill, resume)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return process


def run(output: Path, kill: str | None = None, resume: bool = False) -> int:
    """The exit status of a training process, minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child(output, kill, resume), 0)[1])


def killed_from_outside(output: Path, seconds: list[float]) -> list[int]:
    """A run that gets SIGKILL so many seconds after each of its starts, and then is left to finish."""
    statuses = []
    for i, moment in enumerate(seconds):
        process = child(output, None, resume=i > 0)
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        # On a fast machine the run may be at its end; to go on from there is test_trainer.py's business.
        shutil.rmtree(output / f"checkpoint-{STEPS}", ignore_errors=True)
    return [*statuses, run(output, resume=True)]


def main(folder: Path) -> None:
    """Does all runs below `folder`, and writes the exit statuses into `statuses.json`."""
    statuses: dict[str, Any] = {"straight": run(folder / "straight")}
    for kill in KILLS:
        statuses[kill] = [run(folder / kill, kill)]
        shutil.copytree(folder / kill, folder / "left behind" / kill)
        statuses[kill].append(run(folder / kill, resume=True))
    statuses["outside"] = killed_from_outside(folder / "outside", [1.5, 0.7])
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
