def test_discount():
    pass


def test_rows():
    pass


def test_cheapest():
    pass
