"""The KV cache goes to a network by the name that its forward has for it."""

from torch import nn

from gen.models.load.cache_argument import with_cache


class Older(nn.Module):
    def forward(self, x, past_key_values=None):
        return x


class Newer(nn.Module):
    def forward(self, x, cache=None):
        return x


class Wrapper(Newer):
    def forward(self, x, **more):
        return super().forward(x, **more)


def test_the_name_is_that_of_the_class_or_of_the_one_that_it_extends():
    assert with_cache(Older(), 1) == {"past_key_values": 1}
    assert with_cache(Newer(), 1) == {"cache": 1}
    assert with_cache(Wrapper(), 1) == {"cache": 1}
