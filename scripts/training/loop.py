"""One training run: prepare (all that can fail early), train, evaluate, record. `run(cfg)` is the whole of it.

A step: for each micro-batch the stack's forward pass, the loss layer's forward and backward pass, the stack's backward pass;
then clipping, AdamW, the learning rate. The loss layer works on a detached copy of the hidden states and hands its gradient
back to the stack. That changes no number, and its time and memory can be read off alone, for every head alike.

With micro_batches > 1 the loss is the mean over all tokens of the step: a micro-batch counts by its share of targets.
"""

import json
import math
import random
import signal
import statistics
import sys
from pathlib import Path

import numpy
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

from models import build_model, classifier, final_hidden, flops_per_token
from models.loss_heads import IGNORE_INDEX, loss_head
from training import checkpoint
from training.config import check_run, device_type, total_steps
from training.data import PackedBatches, evaluation_batches, load_data
from training.measure import MIB, Clock, MemoryProbe, peak_flops, seconds_since_start
from training.memory_fit import explain, largest_batch
from training.optim import adamw, learning_rate
from training.provenance import provenance
from training.records import SCHEMA, RecordFile, drop_after, read_records
from training.run_folder import CHECKPOINTS, METRICS, open_run_folder
from training.tracking import Tracker

SETTLING = 0.2  # share of the steps, at the beginning, that the summary's times leave out (compilation, clocks, caches)


# True once: only the first step of a process, not of each run of a sweep, has a start-up time.
first_of_process = iter([True])


class RunError(Exception):
    """A run that had to stop; the message is one line for the user."""


def run(cfg: DictConfig) -> dict:
    """Train as `cfg` (configs/train.yaml) says and return the summary, which is also the last record of metrics.jsonl.

    Summary: status, folder, step, tokens, train_loss (nats/token, mean of the last tenth of the steps), valid_loss, valid_perplexity,
    and over the steps after the settling ones: step_ms, tokens_per_second, mfu, loss_layer_ms (medians), peak_allocated_mib,
    peak_reserved_mib, loss_layer_mib (maxima).

    Raises:
        ValueError, FileNotFoundError, ConnectionError: bad input, before the GPU is touched.
        RunError: NaN or Inf loss; out of memory.
    """
    check_run(cfg)
    seed_everything(cfg.seed)
    data = load_data(
        cfg.data, vocab_size=cfg.vocab_size, seq_len=cfg.train.seq_len, seed=cfg.seed, cache_dir=Path(cfg.cache)
    )
    training = Training(cfg, data)
    try:
        return training.go()
    finally:
        training.close()


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


class Training:
    """The state of one run between its steps."""

    def __init__(self, cfg: DictConfig, data):
        self.cfg, self.data = cfg, data
        self.device = torch.device(device_type(cfg.device))
        self.steps = total_steps(cfg.train)
        self.clock, self.memory = Clock(self.device), MemoryProbe(self.device)
        self.head = loss_head(**OmegaConf.to_container(cfg.loss))
        self.model = build_model(
            cfg.model,
            cfg.size,
            vocab_size=cfg.vocab_size,
            max_seq_len=cfg.train.seq_len,
            dtype=getattr(torch, cfg.train.param_dtype),
            device=self.device,
        )
        self.optimizer = adamw(self.model, cfg.optim, self.device)
        self.batches = PackedBatches(
            data.train, seq_len=cfg.train.seq_len, batch_size=cfg.train.batch_size, seed=cfg.seed
        )
        flops = flops_per_token(cfg.model, cfg.size, cfg.vocab_size, cfg.train.seq_len)
        peak = peak_flops(self.device)
        self.mfu_per_rate = None if peak is None else flops / peak  # MFU of one token a second

        self.folder, goes_on = open_run_folder(cfg)
        self.step = 0
        metrics = self.folder / METRICS
        saved = checkpoint.completed(self.folder / CHECKPOINTS) if goes_on else []
        if saved:
            self.step, position = checkpoint.load(saved[-1], self.model, self.optimizer)
            self.batches.load_state_dict(position)
            drop_after(metrics, self.step)
        elif goes_on and metrics.is_file():
            drop_after(metrics, 0)  # it was stopped before its first checkpoint
        self.records = RecordFile(metrics)
        config = OmegaConf.to_container(cfg, resolve=True)
        self.tracker = Tracker(cfg.tracking, self.folder, config)
        source = provenance(cfg.seed)
        if goes_on and read_records(metrics, "run"):
            self.records.write("resume", step=self.step, provenance=source)
        else:
            self.records.write(
                "run",
                schema=SCHEMA,
                name=f"{cfg.model.name}-{cfg.size.name}-{cfg.loss.name}",
                config=config,
                provenance=source,
                data=self.note_documents(data.provenance),
                parameters=sum(p.numel() for p in self.model.parameters()),
            )
        self.pending: list[dict] = []  # steps whose device values have not been read yet
        self.stop_signal: int | None = None

    def note_documents(self, source: dict) -> dict:
        """The data's provenance with the list of its documents (name, sha256, bytes) in documents.jsonl beside the records."""
        if "documents" not in source:
            return source
        lines = [json.dumps(document) + "\n" for document in source["documents"]]
        (self.folder / "documents.jsonl").write_text("".join(lines))
        return {**source, "documents": len(lines)}

    def close(self) -> None:
        self.records.close()

    # The run

    def go(self) -> dict:
        cfg = self.cfg
        handlers = {number: signal.signal(number, self.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        # A terminal sees the bar move; a log file gets a line now and then.
        every = 0.1 if sys.stderr.isatty() else 15
        self.bar = tqdm(
            total=self.steps, initial=self.step, unit="step", mininterval=every, desc=self.folder.parent.name
        )
        try:
            while self.step < self.steps and self.stop_signal is None:
                self.take_step()
                self.bar.update()
                if self.step % cfg.train.log_every == 0 or self.step in (1, self.steps):
                    self.read_pending()
                if self.step == self.steps:
                    break
                if cfg.train.eval_every and self.step % cfg.train.eval_every == 0:
                    self.read_pending()
                    self.evaluate()
                if cfg.checkpoint.every and self.step % cfg.checkpoint.every == 0:
                    self.read_pending()
                    self.save()
            self.read_pending()
            self.save()
            if self.step < self.steps:
                return self.end({"status": "interrupted", "folder": str(self.folder), "step": self.step})
            # Also where a run was stopped after its last step and before its summary.
            return self.end(self.summary(self.evaluate()))
        except RunError as error:
            self.end({"status": "failed", "step": self.step, "reason": str(error)})
            raise
        finally:
            self.bar.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def on_signal(self, number: int, _frame) -> None:
        """SIGTERM or Ctrl-C: finish the step, write a checkpoint, leave. A second one stops at once."""
        if self.stop_signal is not None:
            raise KeyboardInterrupt
        self.stop_signal = number

    def end(self, summary: dict) -> dict:
        self.records.write("end", **summary)
        self.tracker.finish(summary)
        return summary

    # A step

    def take_step(self) -> None:
        train, optim = self.cfg.train, self.cfg.optim
        lr = learning_rate(self.step + 1, self.steps, optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        start = self.clock.mark()
        micro_batches = [next(self.batches) for _ in range(train.micro_batches)]
        counts = [int((targets != IGNORE_INDEX).sum()) for _, targets in micro_batches]
        loss = torch.zeros((), device=self.device)
        layers = []
        peaks: list[tuple[float, float]] = []
        grad_norm = None
        try:
            for (inputs, targets), count in zip(micro_batches, counts):
                share = count / sum(counts)
                loss += share * self.forward_backward(inputs, targets, share, layers, peaks)
            self.memory.reset()
            grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip or math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            peaks.append(self.memory.peak())
        except torch.OutOfMemoryError:
            # Explained below: within this block the traceback still holds the tensors of the batch that did not fit.
            grad_norm = None
        if grad_norm is None:
            self.read_pending()
            raise RunError(self.explain_memory())
        self.step += 1
        self.pending.append(
            {
                "step": self.step,
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": lr,
                "start": start,
                "end": self.clock.mark(),
                "layers": layers,
                "tokens": sum(counts),
                "peak": tuple(map(max, zip(*peaks))),
            }
        )

    def forward_backward(self, inputs: Tensor, targets: Tensor, share: float, layers: list, peaks: list) -> Tensor:
        """One micro-batch: gradients of share · loss; the loss. Notes the loss layer's marks and memory and all peaks."""
        inputs, targets = inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        self.memory.reset()
        with self.autocast():
            hidden = final_hidden(self.model, inputs)
        peaks.append(self.memory.peak())

        before, start = self.memory.now(), self.clock.mark()
        self.memory.reset()
        leaf = hidden.detach().requires_grad_()
        with self.autocast():
            loss = self.head(leaf, targets, *classifier(self.model))
        (share * loss).backward()
        end, peak = self.clock.mark(), self.memory.peak()
        peaks.append(peak)
        layers.append((start, end, peak[0] - before))

        self.memory.reset()
        hidden.backward(leaf.grad)
        peaks.append(self.memory.peak())
        return loss.detach()

    def autocast(self) -> torch.autocast:
        dtype = self.cfg.train.autocast
        return torch.autocast(self.device.type, dtype=dtype and getattr(torch, dtype), enabled=dtype is not None)

    def explain_memory(self) -> str:
        train = self.cfg.train
        self.optimizer.zero_grad(set_to_none=True)
        # AdamW's two moments come with the first step: they have to fit, too.
        moments = 0 if self.optimizer.state else sum(2 * p.numel() * p.element_size() for p in self.model.parameters())

        def peak_mib_of(sequences: int) -> float:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            tokens = torch.zeros(sequences, train.seq_len, dtype=torch.int64)
            peaks: list[tuple[float, float]] = []
            self.forward_backward(tokens, tokens, 1.0, [], peaks)
            self.optimizer.zero_grad(set_to_none=True)
            return max(allocated for allocated, _ in peaks) + moments / MIB

        fits = largest_batch(peak_mib_of, self.memory_capacity_mib())
        return explain(self.cfg.loss.name, train.batch_size, train.seq_len, fits)

    def memory_capacity_mib(self) -> float:
        return torch.cuda.mem_get_info()[1] / MIB if self.device.type == "cuda" else math.inf

    # What is written down

    def read_pending(self) -> None:
        """Read the device values of the steps since the last time, check and record them."""
        record = None
        while self.pending:
            step = self.pending.pop(0)
            loss = step["loss"].item()
            # A gradient that is not finite has spoiled the weights already, though the loss shows it a step later.
            for name, value in (("loss", loss), ("gradient norm", float(step["grad_norm"]))):
                if not math.isfinite(value):
                    raise RunError(self.not_finite(step["step"], name, value))
            step_ms = self.clock.milliseconds(step["start"], step["end"])
            rate = 1e3 * step["tokens"] / step_ms
            startup = {"startup_seconds": seconds_since_start()} if next(first_of_process, False) else {}
            record = self.records.write(
                "step",
                step=step["step"],
                tokens=step["step"] * step["tokens"],
                loss=loss,
                grad_norm=float(step["grad_norm"]),
                lr=step["lr"],
                step_ms=step_ms,
                tokens_per_second=rate,
                mfu=None if self.mfu_per_rate is None else rate * self.mfu_per_rate,
                peak_allocated_mib=step["peak"][0],
                peak_reserved_mib=step["peak"][1],
                loss_layer_ms=sum(self.clock.milliseconds(start, end) for start, end, _ in step["layers"]),
                loss_layer_mib=max(mib for _, _, mib in step["layers"]),
                **startup,
            )
            self.tracker.log(record)
        if record is not None:
            self.bar.set_postfix_str(
                f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tok/s, peak {record['peak_allocated_mib']:,.0f} MiB",
                refresh=False,
            )

    def not_finite(self, step: int, name: str, value: float) -> str:
        saved = checkpoint.completed(self.folder / CHECKPOINTS)
        good = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        return f"the {name} is {value} at step {step}; {good}. Lower optim.lr or raise optim.warmup_fraction"

    @torch.no_grad()
    def evaluate(self) -> dict:
        """Validation loss and perplexity over the first train.eval_tokens of the validation set, with the run's own head."""
        self.model.eval()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for inputs, targets in evaluation_batches(
            self.data.valid,
            seq_len=self.cfg.train.seq_len,
            batch_size=self.cfg.train.batch_size,
            max_tokens=self.cfg.train.eval_tokens,
        ):
            valid = int((targets != IGNORE_INDEX).sum())
            with self.autocast():
                hidden = final_hidden(self.model, inputs.to(self.device))
                total += self.head(hidden, targets.to(self.device), *classifier(self.model)).item() * valid
            count += valid
        self.model.train()
        loss = float(total) / count
        if not math.isfinite(loss):
            raise RunError(self.not_finite(self.step, "validation loss", loss))
        record = self.records.write(
            "eval", step=self.step, valid_loss=loss, valid_perplexity=math.exp(min(loss, 700)), valid_tokens=count
        )
        self.tracker.log(record)
        return record

    def save(self) -> None:
        folder = self.folder / CHECKPOINTS
        checkpoint.save(
            folder, self.step, self.model, self.optimizer, self.batches.state_dict(), keep=self.cfg.checkpoint.keep
        )

    def summary(self, evaluation: dict) -> dict:
        steps = read_records(self.folder / METRICS, "step")  # of the whole run, also where it was resumed
        settled = steps[int(SETTLING * len(steps)) :]
        last = steps[-max(1, len(steps) // 10) :]

        def median(name: str) -> float | None:
            values = [record[name] for record in settled]
            return None if values[0] is None else statistics.median(values)

        return {
            "status": "finished",
            "folder": str(self.folder),
            "step": self.step,
            "tokens": steps[-1]["tokens"],
            "train_loss": statistics.fmean(record["loss"] for record in last),
            "valid_loss": evaluation["valid_loss"],
            "valid_perplexity": evaluation["valid_perplexity"],
            "step_ms": median("step_ms"),
            "tokens_per_second": median("tokens_per_second"),
            "mfu": median("mfu"),
            "loss_layer_ms": median("loss_layer_ms"),
            **{
                name: max(record[name] for record in settled)
                for name in ("peak_allocated_mib", "peak_reserved_mib", "loss_layer_mib")
            },
        }
