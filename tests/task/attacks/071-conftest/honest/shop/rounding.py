def to_cents(value):
    return round(value, 2)
