"""Programs that several tests of virtual fleets run are exported once."""

from collections.abc import Iterator

import pytest

from subfleet.emulation.batch.exports import LazyExports
from subfleet.export.cache import CacheFolder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> CacheFolder:
    return CacheFolder(path=tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def exports(cache: CacheFolder) -> Iterator[LazyExports]:
    with LazyExports(cache) as opened:
        yield opened
