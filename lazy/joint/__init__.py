"""Joint forward and backward of a captured call, recorded ahead of time; gradients of any order.

Enters: a recorded forward. Leaves: a joint trace, and the autograd function that runs its halves. Below it: device,
plan.
"""
