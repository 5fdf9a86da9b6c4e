"""``torch.compile`` where it works, the same function in eager mode where it does not."""

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled once for all shapes; eager, with one warning, if compiling fails.

    The function must be free of shape-checking decorators (they break the graph): it is unwrapped, and whatever it
    calls must be plain torch. A compiled function differs from the eager one by rounding. Shapes beyond the number that
    torch keeps compiled run in eager mode.
    """
    plain = inspect.unwrap(function)
    fast: Callable[..., Any] = torch.compile(plain, dynamic=True, fullgraph=True)
    broken: list[str] = []

    def call(*arguments: object) -> Any:
        if broken:
            return plain(*arguments)
        try:
            return fast(*arguments)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            return plain(*arguments)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            broken.append(str(error))
            first = str(error).splitlines()[0]
            warnings.warn(f"{plain.__name__} runs in eager mode, it cannot be compiled here: {first}", stacklevel=2)
            return plain(*arguments)

    return call
