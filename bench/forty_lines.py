"""Algorithm 1 of the paper in forty plain lines: what one would write without revdeq, and what it is timed against.

States are float64; evaluations of f and adjoints have z0's dtype. There is no kernel, no check and no option, f may use
no random numbers, and gradients reach only z0, x and the parameters that are passed.
"""

import torch


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, beta, steps, z0, x, *parameters):
        y = z = z0.double()
        for _ in range(steps):
            y = (1 - beta) * y + beta * f(z.to(z0.dtype), x).double()
            z = (1 - beta) * z + beta * f(y.to(z0.dtype), x).double()
        ctx.f, ctx.beta, ctx.steps = f, beta, steps
        ctx.save_for_backward(y, z, x, *parameters)
        return z.to(z0.dtype)

    @staticmethod
    def backward(ctx, z_bar):
        f, beta, (y, z, x, *parameters) = ctx.f, ctx.beta, ctx.saved_tensors
        x = x.detach().requires_grad_()
        y_bar = torch.zeros_like(z_bar)
        sums = [torch.zeros_like(t) for t in (x, *parameters)]

        def repeated(state, adjoint):
            """f at a state, and the product of an adjoint with its derivative by the state."""
            with torch.enable_grad():
                read = state.to(adjoint.dtype).requires_grad_()
                output = f(read, x)
                product, *others = torch.autograd.grad(output, [read, x, *parameters], adjoint)
            for total, other in zip(sums, others, strict=True):
                total += other
            return output.detach().double(), product

        for _ in range(ctx.steps):
            f_y, product = repeated(y, beta * z_bar)
            z = (z - beta * f_y) / (1 - beta)
            y_bar = y_bar + product
            f_z, product = repeated(z, beta * y_bar)
            y = (y - beta * f_z) / (1 - beta)
            y_bar, z_bar = (1 - beta) * y_bar, (1 - beta) * z_bar + product
        return None, None, None, y_bar + z_bar, *sums


def solve(f, z0, x, beta=0.5, max_steps=8):
    return Reversible.apply(f, beta, max_steps, z0, x, *f.parameters())
