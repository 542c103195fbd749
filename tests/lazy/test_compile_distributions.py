"""Distributions of torch's that a compiled call names are state of it: followed by the guards, not a reason to run."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributions as D
import torchlazy

pytestmark = pytest.mark.usefixtures("operator_by_operator")


PRIORS = {
    "normal": lambda: D.Normal(torch.zeros(3), torch.ones(3)),
    "multivariate normal": lambda: D.MultivariateNormal(torch.zeros(3), torch.eye(3)),
    "transformed": lambda: D.TransformedDistribution(
        D.Normal(torch.zeros(3), 1.0), [D.transforms.AffineTransform(torch.ones(3), torch.full((3,), 2.0))]
    ),
    "independent": lambda: D.Independent(D.Laplace(torch.zeros(3), torch.ones(3)), 1),
    "categorical": lambda: D.MixtureSameFamily(
        D.Categorical(torch.tensor([0.3, 0.7])), D.Independent(D.Normal(torch.zeros(2, 3), 1.0), 1)
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_a_distribution_that_the_call_names_is_state(name):
    prior = PRIORS[name]()

    def log_prob(x):
        return prior.log_prob(x * 2) + prior.log_prob(x)

    compiled = torchlazy.compile(log_prob)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(6):
            x = torch.tensor([0.1, 0.2, 0.3]) * number
            torch.testing.assert_close(compiled(x), log_prob(x))
    assert compiled.report().replays > 0


def test_another_value_in_a_distribution_is_seen():
    prior = D.Normal(torch.zeros(3), torch.ones(3))
    compiled = torchlazy.compile(lambda x: prior.log_prob(x))
    for number in range(9):
        if number == 5:
            prior.loc = torch.full((3,), 5.0)
        if number == 7:
            prior.scale.mul_(3)
        x = torch.full((3,), number / 9)
        torch.testing.assert_close(compiled(x), prior.log_prob(x))
    assert compiled.report().replays > 0
