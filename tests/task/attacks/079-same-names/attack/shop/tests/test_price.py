def test_discount():
    pass
