"""Retry-After in both spellings."""

import datetime
from email import utils as email_utils

import pytest

from stppo_jax.retrieval import replies


@pytest.mark.parametrize(
  ('value', 'seconds'),
  [
    (None, 0.0),
    ('3', 3.0),
    ('0.5', 0.5),
    ('-4', 0.0),
    ('nan', 0.0),
    ('inf', 0.0),
    ('soon', 0.0),
    ('', 0.0),
    ('Wed, 21 Oct 2015 07:28:00 GMT', 0.0),
  ],
)
def test_retry_after(value, seconds):
  assert replies.retry_after_seconds(value) == seconds


def test_retry_after_as_a_date():
  then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=90)
  value = email_utils.format_datetime(then, usegmt=True)
  assert 85 < replies.retry_after_seconds(value) <= 90
