"""Programs of looped models, TRM, HRM and Huginn, with their own loops and with ours.

    git clone https://github.com/SamsungSAILMontreal/TinyRecursiveModels
    git clone https://github.com/sapientinc/HRM
    git clone https://github.com/seal-rg/recurrent-pretraining
    pip install einops pydantic
    python bench/looped.py TinyRecursiveModels HRM recurrent-pretraining    # about half an hour; or some of them

The models are built from the code in the checkouts, at a size for a CPU, and trained with their own losses on generated
data: 4 x 4 sudokus for TRM and HRM, with their carries and their halting, and lists to sort for Huginn. Only the loop
is replaced. Nothing is downloaded; torch's attention replaces flash attention, and stubs replace transformers. Rows
that the table already has are not measured again.

gradient error: against a stored graph of the same iteration, relative. cosine: between the gradient and that of a
stored graph of their whole loop. growth: of the adjoint. memory and time (processor time, interleaved): of a forward
and a backward pass. right and solved: the share of cells that are right, and of examples without a mistake, by the
number of updates, for each seed. seconds: processor time until then.
"""

import argparse
import contextlib
import importlib
import sys
import time
import types
import warnings
from pathlib import Path

import table
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from turns import one_thread, take_turns

import revdeq
from revdeq._device import peak_memory
from revdeq.examples._sudoku import grids, puzzles

WIDTH, HEADS, BATCH = 64, 4, 32
LOOPS, DEEP = 4, 16
"""Cycles of TRM and HRM in training, and for the cost of depth. Huginn's block makes four times as many passes."""
DAMPED = {"beta": 0.5, "gamma": 0.25}
ADJOINT = [None]
"""The growth of the adjoint in the last solve."""


def noted(solution):
    if torch.is_grad_enabled():  # HRM looks one segment ahead, without
        ADJOINT[0] = solution.adjoint
    return solution.z


def stored(f, z, x, loops):
    for _ in range(loops):
        z = f(z, x)
    return z


def checkpointed(f, z, x, loops):
    f.checkpointed = True
    return stored(f, z, x, loops)


def reversible(f, z, x, loops, **options):
    return noted(revdeq.solve(f, z, x, max_steps=loops // 2, **{**DAMPED, **options}))


def reversible_with_checkpoint(f, z, x, loops):
    f.checkpointed = True
    return reversible(f, z, x, loops)


def reversible_by_calls(f, z, x, loops):
    steps = loops * f.calls // 2
    return noted(revdeq.solve(f.call, z, x, max_steps=steps, indexed=True, state="exact", **DAMPED))


def damped_last_step(f, z, x, loops):
    return reversible(f, z, x, loops, backward_steps=1)


def undamped(f, z, x, loops):
    return reversible(f, z, x, loops, gamma=1.0)


def plain(f, z, x, loops):
    return noted(revdeq.loop(f, z, x, times=loops))


OWN = "their own loop"
LOOP = {
    OWN: None,
    "stored graph of their loop": stored,
    "checkpoint around every call": checkpointed,
    "reversible, gamma .25": reversible,
    "reversible, checkpoint in f": reversible_with_checkpoint,
    "reversible, one call in f": reversible_by_calls,
    "reversible, gamma .25, last step": damped_last_step,
    "reversible, gamma 1": undamped,
    "revdeq.loop": plain,
}
ITERATIONS = {
    "reversible, gamma .25": DAMPED,
    "reversible, checkpoint in f": DAMPED,
    "reversible, gamma 1": {"beta": 0.5, "gamma": 1.0},
    "revdeq.loop": {"beta": 63 / 64, "gamma": 1.0},
}


def same_iteration(options):
    """The same iteration in a stored graph, with a float64 state."""
    return lambda f, z, x, loops: revdeq.baselines.stored_graph(f, z, x, max_steps=loops // 2, **options)


class Cycle:
    """f of TRM and HRM: a thought, `thoughts` times, and an answer. `call` is one of them."""

    def __init__(self, inner):
        self.low, self.high = inner.L_level, getattr(inner, "H_level", inner.L_level)
        self.calls = inner.config.L_cycles + 1
        self.rotation = {"cos_sin": inner.rotary_emb() if hasattr(inner, "rotary_emb") else None}
        self.checkpointed = False

    def __call__(self, carry, x):
        for k in range(self.calls):
            carry = self.call(carry, x, evaluation=k)
        return carry

    def call(self, carry, x, evaluation):
        run = checkpoint if self.checkpointed else (lambda level, *args, use_reentrant, **kw: level(*args, **kw))
        if evaluation % self.calls == self.calls - 1:
            high = run(self.high, carry.z_H, carry.z_L, use_reentrant=False, **self.rotation)
            return type(carry)(z_H=high, z_L=carry.z_L)
        low = run(self.low, carry.z_L, carry.z_H + x, use_reentrant=False, **self.rotation)
        return type(carry)(z_H=carry.z_H, z_L=low)


class Sudoku:
    """TRM. Its loss calls its wrapper, which halts, and that calls the inner model. It has an MLP instead of attention,
    as its authors use for sudokus."""

    thoughts, segments, rate, updates = 2, 4, 2e-3, (50, 100, 150)
    positions = "none"
    learnt = OWN, "stored graph of their loop", "reversible, gamma .25", "reversible, gamma .25, last step"

    def __init__(self, module, name, loops, loop):
        config = {
            "batch_size": BATCH, "seq_len": 16, "num_puzzle_identifiers": 1, "vocab_size": 5, "H_cycles": loops,
            "L_cycles": self.thoughts, "H_layers": 1, "L_layers": 1, "hidden_size": WIDTH, "expansion": 2.0,
            "num_heads": HEADS, "pos_encodings": self.positions, "mlp_t": True, "halt_max_steps": self.segments,
            "halt_exploration_prob": 0.1, "forward_dtype": "float32", "puzzle_emb_len": 0,
        }  # fmt: skip
        self.model = getattr(importlib.import_module(module), name)(config)
        self.head = importlib.import_module("models.losses").ACTLossHead(self.model, "stablemax_cross_entropy")
        self.inner, self.solutions, self.carry = self.model.inner, grids(), None
        if loop is not None:
            self.inner.forward = self.looped(loop, loops)

    def looped(self, loop, loops):
        """The replacement of their forward pass."""
        inner = self.inner

        def forward(carry, batch):
            x = inner._input_embeddings(batch["inputs"], batch["puzzle_identifiers"])
            end = loop(Cycle(inner), carry, x, loops)
            logits, q = inner.lm_head(end.z_H)[:, inner.puzzle_emb_len :], inner.q_head(end.z_H[:, 0]).float()
            return type(carry)(z_H=end.z_H.detach(), z_L=end.z_L.detach()), logits, (q[..., 0], q[..., 1])

        return forward

    def batch(self, count=BATCH):
        clues, answers = puzzles(count, self.solutions)
        return {"inputs": clues, "labels": answers, "puzzle_identifiers": torch.zeros(count, dtype=torch.int32)}

    def loss(self, batch):
        carry = self.head.initial_carry(batch) if self.carry is None else self.carry
        self.carry, loss, *_ = self.head(return_keys=[], carry=carry, batch=batch)
        return loss / BATCH

    def start_anew(self):
        self.carry = None

    def solved(self, count=200):
        batch = self.batch(count)
        carry = self.model.initial_carry(batch)
        self.model.eval()
        with torch.no_grad():
            for _ in range(self.segments):
                carry, outputs = self.model(carry=carry, batch=batch)
        self.model.train()
        return shares(outputs["logits"], batch["labels"], batch["inputs"] == 0)


class HierarchicalSudoku(Sudoku):
    """HRM, with learned positions. It learns more slowly than TRM: most sudokus are solved after 800 updates."""

    positions, updates = "learned", (200, 400, 600, 800)
    learnt = OWN, "stored graph of their loop", "reversible, gamma .25"


class CoreBlock:
    """f of Huginn."""

    calls = 1

    def __init__(self, model, freqs_cis, block_idx):
        self.run = lambda z, x: model.core_block_forward(z, x, freqs_cis, None, None, block_idx, 0)[0]
        self.model, self.checkpointed = model, False

    def __call__(self, z, x):
        return checkpoint(self.run, z, x, use_reentrant=False) if self.checkpointed else self.run(z, x)

    def call(self, z, x, evaluation):
        return self(z, x)


class Sorting:
    """Huginn predicts the next token of digits, a separator, and the sorted digits."""

    digits, back, rate, updates = 8, 4, 1e-3, (50, 100, 150)
    learnt = OWN, "stored graph of their loop", "reversible, gamma 1", "revdeq.loop"
    """back: the number of passes that have a gradient in their own loop."""

    def __init__(self, module, name, loops, loop):
        code = importlib.import_module(module)
        config = code.RavenConfig(
            n_embd=WIDTH, n_heads=HEADS, block_size=32, vocab_size=12, intermediate_size=2 * WIDTH,
            n_layers_in_recurrent_block=1, n_layers_in_prelude=1, n_layers_in_coda=1, mean_recurrence=loops,
            mean_backprop_depth=self.back, n_layers=3,
        )  # fmt: skip
        self.model = getattr(code, name)(config)
        self.steps = torch.tensor([loops - self.back, self.back])
        if loop is not None:
            self.model.iterate_forward = self.looped(loop, loops)

    def looped(self, loop, loops):
        model = self.model

        def iterate(x, states, freqs_cis, block_idx, *rest):
            z = loop(CoreBlock(model, freqs_cis, block_idx), model.initialize_state(x), x, loops)
            return model.transformer.ln_f(z), 0, loops, z.detach(), block_idx

        return iterate

    def batch(self, count=BATCH):
        digits = torch.randint(10, (count, self.digits))
        whole = torch.cat([digits, torch.full((count, 1), 10), digits.sort(1).values], 1)
        labels = whole[:, 1:].clone()
        labels[:, : self.digits] = -100
        return {"input_ids": whole[:, :-1], "labels": labels}

    def loss(self, batch):
        return self.model(**batch, num_steps=self.steps).loss

    def start_anew(self):
        """There is no carry."""

    def solved(self, count=200):
        batch = self.batch(count)
        with torch.no_grad():
            logits = self.model(**batch, num_steps=self.steps).logits
        return shares(logits, batch["labels"], batch["labels"] >= 0)


def shares(logits, labels, asked):
    """The share of cells that are right, and of examples without a mistake."""
    right = logits.argmax(-1) == labels
    return right[asked].float().mean().item(), (right | ~asked).all(1).float().mean().item()


PROGRAMS = {
    "TRM": (Sudoku, "models.recursive_reasoning.trm", "TinyRecursiveReasoningModel_ACTV1", 1),
    "HRM": (HierarchicalSudoku, "models.hrm.hrm_act_v1", "HierarchicalReasoningModel_ACTV1", 1),
    "Huginn": (Sorting, "recpre.raven_modeling_minimal", "RavenForCausalLM", 4),
}
"""The last number is the number of passes of f per cycle."""


def program_in(checkout):
    for name, (_, module, *_) in PROGRAMS.items():
        if (checkout / module.replace(".", "/")).with_suffix(".py").exists():
            return name
    raise SystemExit(f"{checkout} is a clone of none of {', '.join(PROGRAMS)}")


@contextlib.contextmanager
def importing(checkout):
    """Import from a checkout, with stubs for packages that need a GPU or a model hub."""
    before = set(sys.modules)
    sys.path.insert(0, str(checkout))
    sys.modules["flash_attn"] = types.SimpleNamespace(flash_attn_func=attention)
    sys.modules["recpre"] = package = types.ModuleType("recpre")  # without the training's own packages
    package.__path__ = [str(checkout / "recpre")]
    for name in ("transformers", "transformers.cache_utils", "transformers.utils", "transformers.generation.utils"):
        sys.modules[name] = types.SimpleNamespace(
            PretrainedConfig=Config, PreTrainedModel=Pretrained, ModelOutput=object, GenerateDecoderOnlyOutput=object,
            **{n: type(n, (), {"register": lambda *args: None}) for n in NAMES},
        )  # fmt: skip
    try:
        yield
    finally:
        sys.path.remove(str(checkout))
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("models", "flash_attn", "recpre", "transformers"):
                del sys.modules[name]


NAMES = (
    "GenerationMixin", "GenerationConfig", "Cache", "DynamicCache", "StaticCache", "AutoConfig", "AutoModel",
    "AutoModelForCausalLM",
)  # fmt: skip


class Config:
    def __init__(self, **keywords):
        self.__dict__.update(keywords)

    register_for_auto_class = staticmethod(lambda *args: None)


class Pretrained(torch.nn.Module):
    register_for_auto_class = staticmethod(lambda *args: None)

    def __init__(self, config):
        super().__init__()

    def post_init(self):
        self.apply(self._init_weights)

    def tie_weights(self):
        self.get_output_embeddings().weight = self.get_input_embeddings().weight


def attention(q, k, v, causal):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).contiguous()


class Measured:
    def __init__(self, name, results):
        self.name, self.results = name, results
        self.kind, self.module, self.model, self.factor = PROGRAMS[name]

    def made(self, loop, loops, seed=0):
        torch.manual_seed(seed)
        program = self.kind(self.module, self.model, loops * self.factor, loop)
        torch.manual_seed(seed + 1)
        return program

    def gradient(self, loop, loops):
        """The gradient of the first update, with the same weights and data for all loops; and the adjoint's growth."""
        program, ADJOINT[0] = self.made(loop, loops), None
        program.loss(program.batch()).backward()
        grads = [p.grad.flatten() for p in program.model.parameters() if p.grad is not None]
        return torch.cat(grads), ADJOINT[0] and ADJOINT[0].growth.item()

    def gradients(self, loops):
        if self.known(self.name, "revdeq.loop", loops * self.factor):
            return
        whole, _ = self.gradient(stored, loops)
        columns = ("gradient error", "cosine", "norm", "growth")
        print(f"\n{self.name}, {loops * self.factor} loops\n{'':32}" + "".join(f"{name:>16}" for name in columns))
        for name, loop in LOOP.items():
            ours, growth = self.gradient(loop, loops)
            cosine = F.cosine_similarity(ours, whole, 0).item()
            said = {"cosine": cosine, "norm": ours.norm().item()}
            if growth is not None:
                said["growth"] = growth
            if name in ITERATIONS:
                expected, _ = self.gradient(same_iteration(ITERATIONS[name]), loops)
                said["gradient error"] = ((ours - expected).norm() / expected.norm()).item()
            self.add(name, loops, {key: [value] for key, value in said.items()})
            shown = [f"{said[k]:16.2g}" if k in said else " " * 16 for k in columns]
            print(f"{name:32}{''.join(shown)}", flush=True)

    def costs(self, loops, clock):
        if self.known(f"{self.name}, costs", "revdeq.loop", loops * self.factor):
            return
        runs = {}
        for name, loop in LOOP.items():
            program = self.made(loop, loops)
            batch = program.batch()

            def run(program=program, batch=batch):
                program.start_anew()
                program.loss(batch).backward()
                program.model.zero_grad()

            runs[name] = run
        seconds = take_turns(runs, budget=20.0, rounds=(3, 5), clock=clock)
        print(f"\n{self.name}, {loops * self.factor} loops\n{'':32}{'MiB':>10}{'ms':>10}")
        for name, run in runs.items():
            size = peak_memory(run)
            self.add(name, loops, {"bytes": [size], "seconds": seconds[name]}, ", costs")
            print(f"{name:32}{size / 2**20:10.1f}{1e3 * table.percentiles(seconds[name])[1]:10.0f}", flush=True)

    def learning(self, updates, seed):
        updates = updates or self.kind.updates
        print(f"\n{self.name}, right and solved after so many updates\n{'':32}" + "".join(f"{n:>14}" for n in updates))
        for name in self.kind.learnt:
            if self.known(f"{self.name}, seed {seed}", name, updates[-1]):
                continue
            line = ""
            for n, found in self.curve(LOOP[name], updates, seed).items():
                for quantity, value in found.items():
                    self.results.add(f"looped, {self.name}, seed {seed}", name, n, quantity, [value])
                line += f"{found['right']:7.2f}{found['solved']:7.2f}"
            print(f"{name:32}{line}", flush=True)

    def curve(self, loop, updates, seed):
        program, found, spent = self.made(loop, LOOPS, seed), {}, 0.0
        rate = program.rate
        optimizer = torch.optim.AdamW(program.model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
        for update in range(1, updates[-1] + 1):
            began = time.process_time()
            optimizer.param_groups[0]["lr"] = rate * min(1, update / 20)
            optimizer.zero_grad()
            program.loss(program.batch()).backward()
            torch.nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
            optimizer.step()
            spent += time.process_time() - began
            if update in updates:
                found[update] = dict(zip(("right", "solved"), program.solved(), strict=True), seconds=spent)
        return found

    def known(self, what, name, size):
        rows = table.read(self.results.path)
        return any((row.benchmark, row.provider, row.size) == (f"looped, {what}", name, size) for row in rows)

    def add(self, name, loops, values, part=""):
        for quantity, numbers in values.items():
            self.results.add(f"looped, {self.name}{part}", name, loops * self.factor, quantity, numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", help="clones of TRM, HRM and Huginn, or of some of them")
    parser.add_argument("--updates", type=int, nargs="+", help="default: those of each program")
    parser.add_argument("--seeds", type=int, default=3, help="of the learning curves (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=table.results_folder() / "looped.csv", help="default: %(default)s")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", revdeq.ConvergenceWarning)  # growth is what is measured
    clock, results = one_thread(), table.Table(arguments.out)
    for checkout in arguments.checkouts:
        measured = Measured(program_in(checkout.resolve()), results)
        with importing(checkout.resolve()):
            for loops in (LOOPS, DEEP):
                measured.gradients(loops)
                measured.costs(loops, clock)
            for seed in range(arguments.seeds):
                measured.learning(arguments.updates, seed)


if __name__ == "__main__":
    main()
