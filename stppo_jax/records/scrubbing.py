"""Removes secrets from what is written down or sent to others."""

from collections.abc import Mapping
import re

# Variables that change what is computed, and where.
_VARIABLES = re.compile(
  'JAX_|XLA_|TF_|TPU_|LIBTPU_|CUDA_|NVIDIA_|NCCL_|OMP_|GLIBC_|SLURM_|PYTHON|'
  'NPROC$'
)
_SECRET = re.compile('TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH', re.IGNORECASE)
# A password in an address, and a secret as a parameter.
_SECRET_TEXTS = (
  (re.compile(r'(//)[^/@\s"]+@'), r'\1***@'),
  (
    re.compile(
      r'(--[\w-]*(?:token|secret|key|password)[\w-]*[= ]\s*'
      r'|(?:token|secret|api_?key|password)[\w-]*=)[^\s"\'&]+',
      re.IGNORECASE,
    ),
    r'\1***',
  ),
)


def scrubbed(text: str) -> str:
  """Returns a text without the secrets that addresses and flags contain."""
  for pattern, replacement in _SECRET_TEXTS:
    text = pattern.sub(replacement, text)
  return text


def environment(variables: Mapping[str, str]) -> dict[str, str]:
  """Returns the variables that matter to a program, without secrets."""
  return {
    name: scrubbed(value)
    for name, value in sorted(variables.items())
    if _VARIABLES.match(name) and not _SECRET.search(name)
  }
