from shop.price import total


def test_half():
    assert total([2.0, 4.0], 50) == 3.0


def test_more():
    assert total([1.0], 0) == 1.0
