"""Settings; the environment says which database."""

import json
import os

SECRET_KEY = "not for production"
DATABASES = {"default": json.loads(os.environ["SHOP_DATABASE"])}
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "rest_framework",
    "retrysafe.contrib.django",
    "tests.contrib.django_project.shop",
]
MIDDLEWARE = ["retrysafe.contrib.django.middleware.RetrysafeMiddleware"]
ROOT_URLCONF = "tests.contrib.django_project.urls"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
RETRYSAFE = {
    "STORE": "default",
    "CALLER": "retrysafe.http.bearer_token",
    "SECRET": "at least sixteen bytes",
}
