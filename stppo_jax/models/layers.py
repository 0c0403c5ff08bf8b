"""Defines the parts that larger layers are made of: matrices and norms."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.parallel import pieces

Array = jax.Array

INITIALIZER = nnx.initializers.normal(stddev=0.02)


class Linear(nnx.Module):
  """Computes x @ kernel (+ bias), with the kernel stored as [in, out].

  For decoding, the kernel may be stored in pieces, see `parallel.pieces`.
  `adapt` adds low-rank adapters, see `lora`.
  """

  def __init__(self, din: int, dout: int, *, use_bias: bool, rngs: nnx.Rngs):
    self.kernel = nnx.Param(INITIALIZER(rngs.params(), (din, dout)))
    if use_bias:
      self.bias = nnx.Param(jnp.zeros((dout,)))
    self.use_bias = use_bias
    self.adapter_scale = None

  def adapt(self, a: Array, b: Array, *, scale: float) -> None:
    """Makes every later call add scale (x @ a) @ b to its result."""
    self.lora_a, self.lora_b = nnx.Param(a), nnx.Param(b)
    self.adapter_scale = scale

  def __call__(self, x: Array) -> Array:
    # x is flattened to make this a product of two matrices. A batched product
    # would have two faults. Its gradient takes twice as long on a CPU. And the
    # policies of `remat` recognise a product with weights by the absence of
    # batch dimensions.
    flat = x.reshape(-1, x.shape[-1])
    # In decoding, each row has one token.
    prefill = x.shape[-2] > 1
    y = pieces.product(flat, self.kernel.get_value(), join=prefill)
    if self.adapter_scale is not None:
      low_rank = flat @ self.lora_a[...].astype(x.dtype)
      y = y + self.adapter_scale * (low_rank @ self.lora_b[...].astype(x.dtype))
    if self.use_bias:
      y = y + self.bias[...].astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], -1)


class Kernel(nnx.Module):
  """Holds a matrix without adapters, such as a router."""

  def __init__(self, *shape: int, rngs: nnx.Rngs):
    self.kernel = nnx.Param(INITIALIZER(rngs.params(), shape))


class Experts(Kernel):
  """Holds one matrix per expert, together [X, in, out], and their adapters."""

  def __init__(self, *shape: int, rngs: nnx.Rngs):
    super().__init__(*shape, rngs=rngs)
    self.adapter_scale = None

  def adapt(self, a: Array, b: Array, *, scale: float) -> None:
    """Stores the adapters, which add scale a @ b to the matrices of experts.

    See `lora`. Later calls of `matrices` return the adapters too.
    """
    self.lora_a, self.lora_b = nnx.Param(a), nnx.Param(b)
    self.adapter_scale = scale

  def matrices(self, dtype: Any) -> tuple[Array, ...]:
    """Returns (W,), or (W, A, B) if the experts have adapters.

    W [X, in, out] are the matrices of the experts. A [X, in, rank] and
    B [X, rank, out] are the adapters. B is already multiplied by the scale.
    """
    w_XKN = self.kernel[...].astype(dtype)
    if self.adapter_scale is None:
      return (w_XKN,)
    b_XRN = self.adapter_scale * self.lora_b[...].astype(dtype)
    return w_XKN, self.lora_a[...].astype(dtype), b_XRN


class Identity(nnx.Module):
  """Returns its input, in place of a norm that a model does not have."""

  def __call__(self, x: Array) -> Array:
    return x


class RMSNorm(nnx.Module):
  """Computes x / rms(x) · (offset + scale), with rms(x) in float32."""

  def __init__(self, size: int, *, eps: float, offset: float = 0.0):
    # Without an explicit dtype, the scale would be weakly typed, and JAX would
    # compile the program twice.
    self.scale = nnx.Param(jnp.full((size,), 1.0 - offset, jnp.float32))
    self.eps = eps
    self.offset = offset

  def __call__(self, x: Array) -> Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(mean_square + self.eps)
    if self.offset:
      # The sum is in float32, because in bfloat16 an offset of 1 would round
      # away the digits of a scale near 0.
      scale = self.offset + self.scale[...].astype(jnp.float32)
      normed = normed * scale.reshape(*[1] * (x.ndim - 1), -1)
      return normed.astype(x.dtype)
    scale = self.scale[...].astype(x.dtype).reshape(*[1] * (x.ndim - 1), -1)
    return normed.astype(x.dtype) * scale
