"""A maze as it is being solved: what the model answers after N steps, as a picture and as an animation.

    python -m revdeq train maze-tiny
    python bench/maze_picture.py runs/maze-tiny/last.pt            # maze.png and maze.gif in bench/results/evidence

Every answer is a solve of its own, from z = 0. The maze is the first of those of its size that is solved in the end and
has a long path.
"""

import argparse
from pathlib import Path

import torch

from revdeq.training import run as train

DEPTHS = (1, 2, 4, 8, 16, 32)
COLOURS = {"wall": (0.2, 0.2, 0.25), "free": (1, 1, 1), "path": (0.13, 0.53, 0.9), "start": (0.1, 0.65, 0.3)}
END = (0.85, 0.2, 0.2)
MAZES = 200


def answered(checkpoint, cells, depths):
    """A maze, its path, and the probability of each pixel to be on the path by each number of steps."""
    trained = train.restored(checkpoint, None, {"cells": cells})
    inputs, targets, _ = trained.dataset.batch(torch.arange(MAZES), torch.Generator().manual_seed(7))
    lengths = targets.flatten(1).sum(1)
    for i in lengths.argsort(descending=True)[MAZES // 10 :].tolist():
        answers = []
        for trained.model.equilibrium.max_steps in depths:
            with torch.no_grad():
                answers.append(trained.model(inputs[i : i + 1])[0].softmax(-1)[..., 1])
        if ((answers[-1] > 0.5) == (targets[i] == 1)).all():
            return inputs[i], targets[i], answers
    raise SystemExit(
        f"no maze of {cells} x {cells} cells is solved with N = {depths[-1]}: train longer, or use --cells 8"
    )


def picture(maze, answer):
    image = torch.tensor(COLOURS["wall"]).expand(*maze.shape[1:], 3).clone()
    free, start, end = (channel > 0 for channel in maze)
    path = answer[..., None] * torch.tensor(COLOURS["path"]) + (1 - answer[..., None]) * torch.tensor(COLOURS["free"])
    image[free] = path[free]
    image[start], image[end] = torch.tensor(COLOURS["start"]), torch.tensor(END)
    return image.numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--cells", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "evidence")
    arguments = parser.parse_args()
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.figure import Figure

    frames = (*range(1, 33), 40, 48, 64)
    maze, target, answers = answered(arguments.checkpoint, arguments.cells, frames)
    by_depth = dict(zip(frames, answers, strict=True))
    figure = Figure(figsize=(12, 2.4), layout="constrained")
    for axes, depth in zip(figure.subplots(1, len(DEPTHS)), DEPTHS, strict=True):
        axes.imshow(picture(maze, by_depth[depth]))
        right = ((by_depth[depth] > 0.5) == (target == 1)).all()
        axes.set_title(f"N = {depth}{', solved' if right else ''}", fontsize=10)
        axes.axis("off")
    figure.savefig(arguments.out / "maze-solved.png", dpi=100)

    figure = Figure(figsize=(3.2, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    shown = axes.imshow(picture(maze, answers[0]))

    def draw(i):
        shown.set_data(picture(maze, answers[i]))
        axes.set_title(f"{arguments.cells} x {arguments.cells} cells, N = {frames[i]}", fontsize=10)

    animation = FuncAnimation(figure, draw, frames=[*range(len(frames)), *[len(frames) - 1] * 8])
    animation.save(arguments.out / "maze-solved.gif", writer=PillowWriter(fps=6), dpi=80)


if __name__ == "__main__":
    main()
