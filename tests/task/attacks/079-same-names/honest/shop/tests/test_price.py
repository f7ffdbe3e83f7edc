def test_own():
    pass
