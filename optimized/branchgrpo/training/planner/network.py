"""A denoiser as a list of matrix products: what one item costs in parameters, arithmetic and kept activations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FLOAT32 = 4
"""Bytes."""

Trained = Literal["full", "lora"]


@dataclass(frozen=True)
class Linear:
    """A linear layer, or a convolution that is one on patches.

    Attributes:
        name: as adapters' targets name it.
        tokens: rows of one item.
        inputs, outputs: widths.
        bias: whether it has one.
        behind: whether a trained weight lies before it, so that its input has a gradient.
        read: whether its output reaches the velocity; one that does not is computed and never differentiated.
        adaptable: whether an adapter on it could learn anything: the last queries of the text cannot.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    bias: bool = True
    behind: bool = True
    read: bool = True
    adaptable: bool = True

    @property
    def parameters(self) -> int:
        """Weight and bias."""
        return self.inputs * self.outputs + self.outputs * self.bias

    @property
    def product(self) -> int:
        """FLOPs of one product of its size: two an entry."""
        return 2 * self.tokens * self.inputs * self.outputs


@dataclass(frozen=True)
class Attention:
    """softmax(q kᵀ) v of one item, all heads.

    Attributes:
        queries, keys: tokens.
        width: heads · elements a head.
    """

    queries: int
    keys: int
    width: int

    @property
    def flops(self) -> int:
        """Two products, two FLOPs an entry."""
        return 4 * self.queries * self.keys * self.width


@dataclass(frozen=True)
class Kept:
    """Elements of one item that a forward pass keeps for the backward pass.

    Attributes:
        narrow: in the dtype of the arithmetic.
        wide: float32 under autocast (norms and what they scale), the dtype of the arithmetic elsewhere.
        single: always float32 (means and deviations of norms, sums of the softmax).
    """

    narrow: int = 0
    wide: int = 0
    single: int = 0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.narrow + other.narrow, self.wide + other.wide, self.single + other.single)

    def bytes(self, size: int, autocast: bool) -> int:
        """Bytes at ``size`` bytes an element of the arithmetic."""
        return self.narrow * size + self.wide * (FLOAT32 if autocast else size) + self.single * FLOAT32


@dataclass(frozen=True)
class Part:
    """Layers that follow one another, and how often.

    Attributes:
        name: for people.
        linears, attentions: its products.
        other: parameters of norms and tables.
        full, lora: what is kept when all weights are trained, and when adapters of ``JOINT_ATTENTION`` are.
        boundary: elements of its inputs, all that is kept of it under gradient checkpointing.
        count: how many there are.
        block: whether checkpointing and sharding go by it.
    """

    name: str
    linears: tuple[Linear, ...]
    attentions: tuple[Attention, ...] = ()
    other: int = 0
    full: Kept = field(default_factory=Kept)
    lora: Kept = field(default_factory=Kept)
    boundary: int = 0
    count: int = 1
    block: bool = True

    @property
    def parameters(self) -> int:
        """Of one such part."""
        return sum(linear.parameters for linear in self.linears) + self.other


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters: which layers carry one, and of which rank."""

    rank: int
    targets: tuple[str, ...]

    def of(self, linear: Linear) -> bool:
        """Whether a layer carries one."""
        return (
            linear.read
            and linear.adaptable
            and any(linear.name == t or linear.name.endswith(f".{t}") for t in self.targets)
        )


@dataclass(frozen=True)
class Network:
    """All parts of a denoiser for one item of one size."""

    parts: tuple[Part, ...]

    def total(self, measure: Callable[[Part], int]) -> int:
        """A measure of the parts, summed."""
        return sum(part.count * measure(part) for part in self.parts)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.total(lambda part: part.parameters)

    def adapted(self, adapters: Adapters) -> int:
        """Weights of the adapters: r · (inputs + outputs) a layer."""
        return self.total(lambda part: sum(adapters.rank * (x.inputs + x.outputs) for x in chosen(part, adapters)))

    def forward(self, adapters: Adapters | None = None) -> int:
        """FLOPs of one velocity: every product, and both products of every adapter."""
        base = self.total(lambda part: sum(x.product for x in part.linears) + sum(a.flops for a in part.attentions))
        return base + (0 if adapters is None else self.total(lambda part: adapter_products(part, adapters)))

    def backward(self, adapters: Adapters | None = None) -> int:
        """FLOPs of the backward pass, recomputation apart.

        A product has two of its size behind it: the gradient of its input and that of its weight. Frozen weights have
        none, and nothing flows to what lies before the first trained weight. An attention has four products where it
        had two.
        """
        if adapters is None:
            return self.total(lambda part: sum(full_backward(x) for x in part.linears) + attention_backward(part))
        return self.total(
            lambda part: (
                sum(x.product for x in part.linears if x.read and x.behind and x.tokens > 1)
                + 2 * adapter_products(part, adapters)
                + attention_backward(part)
            )
        )

    def activations(
        self, size: int, *, adapters: Adapters | None, autocast: bool = False, checkpointing: bool = False
    ) -> int:
        """Bytes that the forward pass of one item keeps for its backward pass, weights apart.

        Args:
            size: bytes an element of the arithmetic.
            adapters: None where all weights are trained.
            autocast: whether a float32 network computes in fewer bits, with its norms in float32.
            checkpointing: each block keeps its inputs; the largest one is computed again and kept whole.
        """

        def kept(part: Part) -> int:
            own = part.full if adapters is None else part.lora
            found = own.bytes(size, autocast)
            if adapters is None:
                return found
            # An adapter in float32 keeps its input widened, and what lies between its two factors.
            widened = sum(FLOAT32 * x.tokens * x.inputs for x in chosen(part, adapters)) if size < FLOAT32 else 0
            return found + widened + sum(FLOAT32 * x.tokens * adapters.rank for x in chosen(part, adapters))

        if not checkpointing:
            return self.total(kept)
        blocks = [part for part in self.parts if part.block]
        outside = sum(part.count * kept(part) for part in self.parts if not part.block)
        inputs = sum(part.count * part.boundary * size for part in blocks)
        return outside + inputs + max(kept(part) for part in blocks)

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block, which sharded weights are gathered by."""
        return max(part.parameters for part in self.parts if part.block)


def chosen(part: Part, adapters: Adapters) -> list[Linear]:
    """The layers of a part that carry an adapter."""
    return [linear for linear in part.linears if adapters.of(linear)]


def adapter_products(part: Part, adapters: Adapters) -> int:
    """FLOPs of a part's adapters, forwards."""
    return sum(2 * x.tokens * adapters.rank * (x.inputs + x.outputs) for x in chosen(part, adapters))


def full_backward(linear: Linear) -> int:
    """FLOPs behind one layer where all weights are trained."""
    return linear.product * (1 + linear.behind) * linear.read


def attention_backward(part: Part) -> int:
    """FLOPs behind the attentions of a part."""
    return 2 * sum(attention.flops for attention in part.attentions)


def mlp(prefix: str, tokens: int, width: int, hidden: int, *, read: bool = True) -> tuple[Linear, Linear]:
    """The two layers of a feed-forward network."""
    return (
        Linear(f"{prefix}.net.0.proj", tokens, width, hidden, read=read),
        Linear(f"{prefix}.net.2", tokens, hidden, width, read=read),
    )


def time_embedding(name: str, inputs: int, width: int) -> tuple[Linear, Linear]:
    """The two layers that embed a time, a scale or a pooled text."""
    return Linear(f"{name}.linear_1", 1, inputs, width, behind=False), Linear(f"{name}.linear_2", 1, width, width)
