"""Losses."""

from tests.autopar.steps.draw import Code, Draw, UnfitError, step


@step(4)
def classes_loss(draw: Draw) -> Code:
    """A loss over classes."""
    x = draw.tensor(least=1, most=3, fits=lambda value: value.shape[1 if value.dim() > 1 else 0] > 1)
    shape = draw.shape(x)
    rank = len(shape)
    if rank == 3 and draw.chance():
        x, shape, rank = f"{x}.flatten(0, 1)", (shape[0] * shape[1], shape[2]), 2
        if shape[1] < 2:
            raise UnfitError
    classes = shape[1 if rank > 1 else 0]
    each = (shape[0], *shape[2:]) if rank > 1 else ()
    options = f"reduction='{draw.choose.choice(('mean', 'mean', 'sum', 'none'))}'"
    if draw.chance(0.2):
        options += f", weight={draw.hold('buffer', draw.normal(classes).abs() + 0.2)}"
    way = draw.choose.randrange(6)
    scale = " * 0.2"
    if way == 0:
        target = draw.given(draw.normal(*shape).softmax(1 if rank > 1 else 0))
        return f"F.cross_entropy({x}, {target}, {options}){scale}"
    if way == 1:
        labels = draw.integers(each, classes, ignored=True)
        return f"F.nll_loss(F.log_softmax({x}, {1 if rank > 1 else 0}), {labels}, {options}){scale}"
    if way == 2:
        options += ", label_smoothing=0.1"
    if way == 3:
        options += f", ignore_index={draw.choose.randrange(classes)}"
        labels = draw.integers(each, classes)
        if not each or bool((draw.value(labels) == int(options.rsplit("=", 1)[1])).all()):
            raise UnfitError
        return f"F.cross_entropy({x}, {labels}, {options}){scale}"
    labels = draw.integers(each, classes, ignored=True)
    if bool((draw.value(labels) == -100).all()):
        raise UnfitError
    return f"F.cross_entropy({x}, {labels}, {options}){scale}"


@step(3)
def elementwise_loss(draw: Draw) -> Code:
    """A loss of each element, or their sum or mean."""
    x = draw.tensor(least=1)
    shape = draw.shape(x)
    y = draw.given(draw.normal(*shape)) if draw.chance() else draw.other(shape)
    if tuple(draw.value(y).shape) != shape:
        raise UnfitError
    difference = draw.values[x] - draw.value(y)
    draw.away(difference, 0.0, 0.7, -0.7)
    reduction = f"reduction='{draw.choose.choice(('mean', 'mean', 'none', 'sum'))}'"
    scale = " * 0.1" if "sum" in reduction else ""
    texts = (
        f"F.mse_loss({x}, {y}, {reduction})",
        f"F.l1_loss({x}, {y}, {reduction})",
        f"F.smooth_l1_loss({x}, {y}, {reduction}, beta=0.7)",
        f"F.huber_loss({x}, {y}, {reduction}, delta=0.7)",
        f"F.binary_cross_entropy({x}.sigmoid(), {y}.sigmoid(), {reduction})",
        f"F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(), {reduction})",
        f"F.kl_div({x}.log_softmax(-1), {y}.softmax(-1), {reduction.replace('mean', 'batchmean')})",
        f"F.soft_margin_loss({x}, {y}.detach().sign(), {reduction})",
    )
    draw.away(draw.value(y), 0.0)
    return draw.choose.choice(texts) + scale
