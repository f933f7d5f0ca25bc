"""Tasks: where the data come from. Importing this package registers the tasks that lingrok ships."""

from lingrok.tasks import modular as modular  # registers 'modular'
from lingrok.tasks import recall as recall  # registers 'recall'
from lingrok.tasks import text as text  # registers 'text'
from lingrok.tasks.base import Batch as Batch
from lingrok.tasks.base import Task as Task
