"""One local Ray for all tests here: it takes seconds to start."""

import pytest

from penstock.scale.cluster import open_cluster


@pytest.fixture(scope="session")
def cluster():
    with open_cluster("", namespace="tests"):
        yield
