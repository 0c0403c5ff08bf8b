"""Checks manifests by the public schemas of Kubernetes and of JobSet."""

import base64
from collections.abc import Iterable
import itertools
from typing import Any

# Maps the kind of an object to its version and to its class in the package.
_OBJECTS = {
  'JobSet': ('jobset.x-k8s.io/v1alpha2', 'JobsetV1alpha2JobSet'),
  'ConfigMap': ('v1', 'IoK8sApiCoreV1ConfigMap'),
  'Service': ('v1', 'IoK8sApiCoreV1Service'),
}
_META = 'IoK8sApimachineryPkgApisMetaV1ObjectMeta'
# The package has no Deployment, but what one consists of.
_DEPLOYMENT = {
  'selector': 'IoK8sApimachineryPkgApisMetaV1LabelSelector',
  'template': 'IoK8sApiCoreV1PodTemplateSpec',
}


def lost(document: Any, known: Any, path: str = ''):
  """Yields the path of each value that a schema's object does not have."""
  if isinstance(document, dict) and isinstance(known, dict):
    for key, value in document.items():
      yield from lost(value, known.get(key), f'{path}.{key}')
  elif isinstance(document, list) and isinstance(known, list):
    for value, other in itertools.zip_longest(document, known):
      yield from lost(value, other, path)
  elif document != known:
    yield path


def check(documents: Iterable[Any]) -> None:
  """Asserts that required fields are there with their types, and no others."""
  for document in documents:
    kind, version = document['kind'], document['apiVersion']
    assert document['metadata']['name']
    if kind == 'Deployment':
      assert version == 'apps/v1'
      assert {*document} == {'apiVersion', 'kind', 'metadata', 'spec'}
      spec = dict(document['spec'])
      assert type(spec.pop('replicas')) is int and {*spec} == {*_DEPLOYMENT}
      _check(document['metadata'], _META)
      for key, part in spec.items():
        _check(part, _DEPLOYMENT[key])
    else:
      expected, name = _OBJECTS[kind]
      assert version == expected
      _check(document, name)


def _check(document: Any, name: str) -> None:
  # Imported here: its hundreds of classes would slow the start of all tests.
  from kubeflow_trainer_api import models

  # It drops what the schema does not have, and adds defaults.
  known = getattr(models, name).from_dict(document)
  if known is None or (found := list(lost(document, known.to_dict()))):
    raise AssertionError(found if known else 'no object')


def archive(config_map: Any) -> bytes:
  """Returns the archive of a ConfigMap."""
  assert set(config_map) == {'apiVersion', 'kind', 'metadata', 'binaryData'}
  (text,) = config_map['binaryData'].values()
  return base64.b64decode(text, validate=True)
