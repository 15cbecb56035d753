"""A maze while it is being solved: the answer of the model after N steps, as a picture and as an animation.

    python -m revdeq train maze-tiny
    python bench/maze_picture.py runs/maze-tiny/last.pt            # maze-solved.png and .gif in bench/results/evidence

Every answer is a separate solve from z = 0. The maze is chosen from 200: among those solved with N = 32, the one with a
long path and many dead ends.
"""

import argparse
from pathlib import Path

import torch

from revdeq.training.restore import restored

DEPTHS = (1, 2, 4, 8, 16, 32)
COLOURS = {"wall": (0.2, 0.2, 0.25), "free": (1, 1, 1), "path": (0.13, 0.53, 0.9), "start": (0.1, 0.65, 0.3)}
END = (0.85, 0.2, 0.2)
FRAMES = (*range(1, 33), 40, 48, 64)


def answered(checkpoint, cells):
    """A maze, its path, and the probability that a pixel is on the path, by the number of steps."""
    trained = restored(checkpoint, None, {"cells": cells})
    generator = torch.Generator().manual_seed(7)
    inputs, targets = (
        torch.cat(part) for part in zip(*(trained.dataset.made(50, generator) for _ in range(4)), strict=True)
    )
    trained.model.eval()

    def answer(mazes, steps):
        trained.model.equilibrium.max_steps = steps
        with torch.no_grad():
            return trained.model(mazes).softmax(-1)[..., 1]

    solved = ((answer(inputs, DEPTHS[-1]) > 0.5) == (targets == 1)).flatten(1).all(1)
    path, free = targets.flatten(1).sum(1), inputs[:, 0].flatten(1).sum(1)
    if not solved.any():
        raise SystemExit(f"no maze of {cells} x {cells} cells is solved with N = {DEPTHS[-1]}: use a smaller --cells")
    chosen = (torch.minimum(path, free - path) * solved).argmax()
    maze = inputs[chosen]
    return maze, targets[chosen], {steps: answer(maze[None], steps)[0] for steps in FRAMES}


def picture(maze, answer):
    image = torch.tensor(COLOURS["wall"]).expand(*maze.shape[1:], 3).clone()
    free, start, end = (channel > 0 for channel in maze)
    path = answer[..., None] * torch.tensor(COLOURS["path"]) + (1 - answer[..., None]) * torch.tensor(COLOURS["free"])
    image[free] = path[free]
    image[start], image[end] = torch.tensor(COLOURS["start"]), torch.tensor(END)
    return image.numpy()


def side_by_side(maze, target, answers):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.8), layout="constrained")
    figure.suptitle("The predicted path (blue) from the start (green) to the end (red)", fontsize=13)
    for axes, depth in zip(figure.subplots(1, len(DEPTHS)), DEPTHS, strict=True):
        axes.imshow(picture(maze, answers[depth]))
        right = ((answers[depth] > 0.5) == (target == 1)).all()
        axes.set_title(f"{depth} step{'s' * (depth > 1)}{', solved' if right else ''}", fontsize=11)
        axes.axis("off")
    return figure


def animation(maze, answers, cells):
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    shown = axes.imshow(picture(maze, answers[FRAMES[0]]))

    def draw(steps):
        shown.set_data(picture(maze, answers[steps]))
        axes.set_title(f"{cells} x {cells} cells, N = {steps}", fontsize=10)

    return FuncAnimation(figure, draw, frames=[*FRAMES, *[FRAMES[-1]] * 8])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--cells", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "evidence")
    arguments = parser.parse_args()
    from matplotlib.animation import PillowWriter

    maze, target, answers = answered(arguments.checkpoint, arguments.cells)
    side_by_side(maze, target, answers).savefig(arguments.out / "maze-solved.png", dpi=100)
    moving = animation(maze, answers, arguments.cells)
    moving.save(arguments.out / "maze-solved.gif", writer=PillowWriter(fps=6), dpi=80)


if __name__ == "__main__":
    main()
