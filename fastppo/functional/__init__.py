"""Stateless functions on tensors: losses, statistics of tokens, advantages.

The public functions are in `losses`, `value_loss`, `tutorial_losses`, `statistics`, `advantages`,
`aggregation` and `lm_head`. They check their arguments with `scalars` and `arguments`, and put them
into records with `operands` and `loss_operands`. `operators` passes the records through torch's
dispatcher to a backend, and `gradients` makes the results differentiable.
"""
