"""f sees the same settings and random numbers in both passes, with any threads and forks."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import revdeq
from revdeq._solver.context import Draw


def in_two_threads(run):
    """The results of run(0) and run(1) in two threads, or an error after a timeout."""
    results = {}

    def note(i):
        results[i] = run(i)

    threads = [threading.Thread(target=note, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2, "the threads wait for each other, or failed"
    return results[0], results[1]


@pytest.mark.parametrize("draws", [False, True])
def test_first_evaluations_in_two_threads_may_wait_for_each_other(draws):
    """They draw from the same generator at the same time, so the first evaluation is repeated."""
    together, met = threading.Barrier(2, timeout=30), threading.local()

    def drawn():
        return (F.dropout(torch.ones(500)) > 0).float() if draws else torch.ones(500)

    def f(z):
        mask = drawn()
        if not getattr(met, "once", False):
            met.once = True
            together.wait()
        return 2 * mask * drawn() + 0 * z

    def run(_):
        return revdeq.solve(f, torch.zeros(500, requires_grad=True), max_steps=12).y.detach()

    for y in in_two_threads(run):
        # with one mask in all evaluations, every element is either 0 or complete
        expected = torch.tensor([0.0, 2 * (2**12 - 1)])
        assert torch.isin((y * 2**12).round(), expected).all()


def test_another_first_evaluation_may_disturb_the_first_two_equally():
    """It does not take the generator lock. If it drew once during each of them, they would leave the generators in the
    same state, with another mask than the others: the second one waits for it."""
    met, has_drawn, go_on, ended = threading.Barrier(2, timeout=30), *(threading.Event() for _ in range(3))
    calls = [0, 0]

    def f(z, thread):
        calls[thread] += 1
        mask = F.dropout(torch.ones(500))
        if calls[thread] == 1:
            has_drawn.set()
            met.wait()
            if thread == 1:
                go_on.wait(0.2)
        if (calls[0], thread) == (2, 0):
            go_on.set()
            ended.wait(30)
        mask = mask * F.dropout(torch.ones(500)) / 2
        if thread == 1:
            ended.set()
        return mask + 0 * z

    def run(thread):
        if thread == 1:
            has_drawn.wait(30)
        return revdeq.solve(f, torch.zeros(500, requires_grad=True), thread, max_steps=12).y.detach()

    for y in in_two_threads(run):
        assert has_one_mask(y, 12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("draws", [False, True])
def test_a_process_forked_while_another_thread_evaluates_can_solve(draws):
    """In the first evaluation of that thread, and in one that holds the generator lock."""
    inside, go_on, calls = threading.Event(), threading.Event(), []

    def f(z):
        calls.append(1)
        out = F.dropout(z) if draws else 0.5 * z
        if len(calls) == (2 if draws else 1):
            inside.set()
            go_on.wait(60)
        return out

    thread = threading.Thread(target=lambda: revdeq.solve(f, torch.zeros(3)))
    thread.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        threading.Timer(30, os._exit, (1,)).start()
        revdeq.solve(lambda z: F.dropout(0.5 * z), torch.zeros(3))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    thread.join()
    assert status == 0, "the child waits for a thread that it does not have"


@pytest.fixture
def another_thread():
    """Draw a number in a separate thread, which stays alive, and return it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda: pool.submit(lambda: torch.rand(1, dtype=torch.float64).item()).result()


def has_one_mask(z, steps):
    """Whether f(z) = dropout(1) had one mask in all evaluations: every element is either 0 or complete."""
    return torch.isin((z * 2**steps).round(), torch.tensor([0.0, 2 * (2**steps - 1)])).all()


@pytest.mark.parametrize("early", [True, False], ids=["before f draws", "after"])
@pytest.mark.parametrize("when", [{3}, {9}, {20}, {45}, {3, 9, 20}])
def test_f_keeps_its_mask_if_another_thread_draws_occasionally(another_thread, when, early):
    """After the first evaluation, and in the backward pass, too. If the thread drew equally much in two successive
    attempts, they would agree by chance, and the check would report it."""
    w, calls = torch.ones(500, requires_grad=True), 0

    def f(z):
        nonlocal calls
        calls += 1
        if calls in when and early:
            another_thread()
        out = F.dropout(w) + 0 * z
        if calls in when and not early:
            another_thread()
        return out

    solution = revdeq.solve(f, torch.zeros(500, requires_grad=True), max_steps=12, check="raise")
    solution.z.sum().backward()
    assert has_one_mask(solution.z, 12)
    assert has_one_mask(w.grad, 12)


def test_an_error_names_a_thread_that_draws_constantly_while_f_draws(another_thread):
    """It draws a different amount every time: with the same amount, f would have the same mask."""
    calls = []

    def f(z):
        calls.append(1)
        for _ in calls:
            another_thread()
        return F.dropout(torch.ones(500)) + 0 * z

    with pytest.raises(RuntimeError, match="another thread draws .* torch.Generator of its own"):
        revdeq.solve(f, torch.zeros(500), max_steps=12)


def test_f_may_draw_new_numbers_in_every_evaluation_while_other_threads_draw(another_thread):
    """All numbers come from one seed."""
    another_thread()
    torch.manual_seed(0)
    drawn = torch.rand(40)
    torch.manual_seed(0)
    seen, counts = [], iter(range(1, 1000))

    def f(z):
        count = 1 + int(100 * z[0]) % 7
        seen.append(torch.rand(count))
        next(counts)
        return 0.5 * z + seen[-1].mean()

    revdeq.solve(f, torch.zeros(3), max_steps=4)
    expected = [drawn[: len(x)] for x in seen]
    assert all(map(torch.equal, seen, expected))
    assert len({len(x) for x in seen}) > 1


def test_a_thread_gets_no_numbers_twice_if_f_draws_none(another_thread):
    """Neither its own numbers, nor those drawn between the evaluations of an f that draws. Whether f draws is found out
    in its second evaluation, with rewound generators."""
    numbers = [another_thread()]

    def f(z):
        numbers.append(another_thread())
        return 0.5 * z

    def drops_out(z):
        return F.dropout(0.5 * z)

    revdeq.solve(f, torch.ones(3, requires_grad=True), max_steps=6).z.sum().backward()
    for solution in revdeq.steps(drops_out, torch.ones(3, requires_grad=True), max_steps=6):
        numbers.append(another_thread())
        solution.z.sum().backward(retain_graph=True)
        numbers.append(another_thread())
    assert numbers.pop(2) == numbers[1]
    assert len(numbers) == len(set(numbers)) == 24 + 12


@pytest.mark.parametrize("when", ["before f draws", "after"])
def test_a_thread_that_draws_during_the_first_evaluation(another_thread, when):
    """The solve starts again, with the mask of the other evaluations."""
    w, calls = torch.ones(500, requires_grad=True), 0

    def f(z):
        nonlocal calls
        calls += 1
        if calls == 1 and when == "before f draws":
            another_thread()
        out = F.dropout(w) + 0 * z
        if calls == 1 and when == "after":
            another_thread()
        return out

    solution = revdeq.solve(f, torch.zeros(500), max_steps=12, check="raise")
    assert calls <= 24 + 3
    solution.z.sum().backward()
    assert has_one_mask(solution.z, 12)
    assert has_one_mask(w.grad, 12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_inside_an_evaluation_can_finish_it():
    """As when f starts workers: the child inherits the running evaluation and can leave it."""
    children = []

    def f(z):
        out = F.dropout(z)
        if len(children) < 3:
            children.append(os.fork())
        return out

    revdeq.solve(f, torch.ones(3), max_steps=3)
    if 0 in children:
        os._exit(1 if Draw.turn.locked() else 0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3


INTERRUPTED = """
    import signal, threading, torch, revdeq
    from revdeq._solver.context import Draw

    f = torch.nn.Dropout()
    interrupted = 0
    for i in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-3 + 7e-6 * (i % 50))
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            while True:
                revdeq.solve(f, torch.ones(3), max_steps=2)
        except KeyboardInterrupt:
            interrupted += 1
            assert not Draw.turn.locked(), i
    assert interrupted == 300
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
def test_an_interrupt_releases_the_generator_lock():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(INTERRUPTED)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PRECISION = """
    import torch, revdeq
    from torch import backends as b
    before = {{}}
    names = {names!r}
    def read():
        return [eval(f"b.{{name}}.fp32_precision") for name in names]
    first = read()
    seen = []
    def f(z, x):
        seen.append(read())
        return 0.5 * z + x
    revdeq._device.used_gpus = lambda: ["cuda"]  # without one, settings of GPUs are not checked
    x = torch.ones(3, requires_grad=True)
    for name in names:
        exec(f"b.{{name}}.fp32_precision = {value!r}")
    z = revdeq.solve(f, torch.zeros(3), x).z
    for name, value in zip(names, first):
        exec(f"b.{{name}}.fp32_precision = {{value!r}}")
    assert read() == first
    z.sum().backward()
    assert read() == first, (read(), first)
    assert seen == [[{value!r}] * len(names)] * 32, seen
    torch.get_float32_matmul_precision()
"""


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (["cuda.matmul"], "tf32"),
        (["cudnn.conv", "cudnn.rnn"], "ieee"),
        (["mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"], "bf16"),
    ],
    ids=["cuda", "cudnn", "mkldnn"],
)
def test_precisions_set_by_the_new_api_are_those_of_the_forward_pass(names, value):
    """In a separate process: afterwards, torch refuses to read some of them by the old API."""
    program = textwrap.dedent(PRECISION.format(names=names, value=value))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_in_a_checkpoint_beside_an_idle_thread(another_thread, reentrant):
    """The checkpoint saves the generators before f draws."""

    def gradient():
        torch.manual_seed(0)
        v = torch.linspace(-1, 1, 50).requires_grad_()

        def f(z):
            return 0.5 * checkpoint(lambda z: F.dropout(torch.tanh(z + v)), z, use_reentrant=reentrant)

        z = revdeq.solve(f, torch.zeros(50), max_steps=2, check="raise").z
        return (z.detach(), *torch.autograd.grad(z.sum(), v)) if not reentrant else _backward(z, v)

    def _backward(z, v):
        z.sum().backward()
        return z.detach(), v.grad

    ours = gradient()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        beside = gradient()
    assert all(map(torch.equal, ours, beside))
    assert torch.equal(ours[0] == 0, ours[1] == 0)  # what is dropped has no gradient


def test_a_solve_with_dropout_inside_f_beside_an_idle_thread(another_thread):
    v = torch.ones(50, requires_grad=True)

    def f(z):
        inner = revdeq.solve(lambda q: 0.5 * F.dropout(v) + 0 * q, z, max_steps=1).z
        return inner * F.dropout(torch.ones(50))

    def solved():
        torch.manual_seed(0)
        z = revdeq.solve(f, torch.zeros(50), max_steps=2, check="raise").z
        return z.detach(), *torch.autograd.grad(z.sum(), v)

    alone = solved()
    another_thread()
    assert all(map(torch.equal, solved(), alone))


def test_one_mask_for_an_initial_state_with_another_layout():
    """A mask is drawn in the order of the memory."""
    masks = []

    def f(z):
        masks.append(F.dropout(torch.ones_like(z)))
        return (0.5 * z * masks[-1]) @ torch.eye(6)

    revdeq.solve(f, torch.zeros(6, 5).t().requires_grad_(), max_steps=3).z.sum().backward()
    assert all(torch.equal(mask, masks[0]) for mask in masks) and len(masks) == 12
