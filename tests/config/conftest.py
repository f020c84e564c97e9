from tests.support.toy_house import car_folder, clean_environment, toy_module  # noqa: F401 (fixtures)
