WAYS: dict = {}
WAYS_WITH_IMAGES: dict = {}
