"""Why the embedded servers cannot start or be reached, each in one line.

EmbeddedError
├── WheelMissing       the package that brings the binary is not installed
├── FolderUnusable     the data folder cannot be made or written
├── DiskFull           too little free space
├── WrongDataVersion   the data was written by another major version of Postgres
├── LockHeld           another process supervises this data folder
├── NoUnprivilegedUser we are root and there is no user to run Postgres as
├── NotRunning         nothing supervises this data folder
└── ServerFailed       a server ended or did not become ready; the message has the end of its log
"""


class EmbeddedError(Exception):
    """Base of all. The message is one line that says what to do."""


class WheelMissing(EmbeddedError):
    pass


class FolderUnusable(EmbeddedError):
    pass


class DiskFull(EmbeddedError):
    pass


class WrongDataVersion(EmbeddedError):
    pass


class LockHeld(EmbeddedError):
    pass


class NoUnprivilegedUser(EmbeddedError):
    pass


class NotRunning(EmbeddedError):
    pass


class ServerFailed(EmbeddedError):
    pass
