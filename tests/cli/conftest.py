from tests.support.toy_house import clean_environment, house, toy_module  # noqa: F401 (fixtures)
