"""The rules for lanes, which configs are checked with too: no jax here."""


def slots_problem(
  slots: int, *, lanes: int, group_size: int, prefix: str = ''
) -> str:
  """Returns why lanes cannot divide slots among them; '' if they can.

  Every lane has the same number of slots, which whole groups fill.

  Args:
    slots: the number of slots of all lanes.
    lanes: the number of lanes.
    group_size: the number of slots of a group.
    prefix: precedes the names of the options in the line.
  """
  multiple = lanes * group_size
  if slots % multiple == 0:
    return ''
  return (
    f'must be a multiple of {multiple}, which is {prefix}lanes={lanes} times '
    f'{prefix}group_size={group_size}'
  )


def devices_problem(lanes: int, num_devices: int) -> str:
  """Returns why lanes cannot run on this number of devices; '' if they can.

  The threads of two lanes could start their programs in another order on each
  device, and collectives of the two programs would then wait for each other for
  ever.
  """
  if lanes == 1 or num_devices == 1:
    return ''
  return (
    f'must be 1 on the {num_devices} devices of this host, on which the engine '
    'decodes'
  )
