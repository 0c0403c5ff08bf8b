"""Checks and shortens URLs of servers, without access to the network."""

from urllib import parse


def check_url(url: str, *, token_variable: str) -> str | None:
  """Returns one line on what is wrong with a server's URL; None if valid.

  Args:
    url: the URL. A valid URL begins with http:// or https:// and has no user,
      password, query or fragment.
    token_variable: the environment variable that the message recommends in
      place of a password in the URL.
  """
  if any(c.isspace() or not c.isprintable() for c in url):
    return f'{url!r} contains white space or control characters'
  try:
    parts = parse.urlsplit(url)
    port = parts.port
  except ValueError as error:
    return f'{url!r} is not a URL: {error}'
  if parts.scheme not in ('http', 'https') or not parts.hostname:
    return f'{url!r} is not an http:// or https:// URL'
  if port == 0:
    return f'{url!r} names port 0'
  if parts.username is not None or parts.password is not None:
    return (
      'user and password in the URL are not allowed; set a bearer token in '
      f'{token_variable}'
    )
  if parts.query or parts.fragment:
    return f'{url!r} has a query or a fragment'
  return None


def base_url(url: str, *, suffix: str, token_variable: str) -> str:
  """Returns a URL without trailing slashes and without `suffix` at its end.

  Users often copy the URL of an endpoint. The path of the endpoint is removed
  here, because every request adds it again.

  Raises:
    ValueError: if the URL is not valid; the message is one line.
  """
  problem = check_url(url, token_variable=token_variable)
  if problem:
    raise ValueError(problem)
  return url.rstrip('/').removesuffix(suffix).rstrip('/')
