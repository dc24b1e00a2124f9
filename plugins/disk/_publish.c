/* Writes and publishes a file in one call without the GIL.
 *
 *     publish_file(directory, temporary, flags, data, stamp, folder, name) -> (errno, created)
 *
 * directory   descriptor of the root, to which all names are relative
 * temporary   name under which the file is created and written; it must not exist
 * flags       added to the flags of open, such as O_DIRECT
 * data        the record, page-aligned if direct; the file has zeros up to the end of its last page
 * stamp       time of access and modification in ns
 * folder      directory that gets the file; created if missing, links are not followed
 * name        name of the file in folder; a file of that name is replaced
 *
 * Returns (0, True) if the file is published. Otherwise the number of the error, and whether the temporary file was
 * created, which is then left.
 *
 * The same calls from Python take and release the GIL six times. In a process with a busy thread, such as the one that
 * launches the kernels of a model, each time delays that thread.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096
#define MAX_WRITE 0x7ffff000 /* of Linux, in whole pages */

static int
open_folder(int directory, const char *folder)
{
    int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int descriptor = openat(directory, folder, flags);
    if (descriptor < 0 && errno == ENOENT && (mkdirat(directory, folder, 0700) == 0 || errno == EEXIST))
        descriptor = openat(directory, folder, flags);
    return descriptor;
}

static int
create(int directory, const char *name, int flags)
{
    int descriptor;
    do
        descriptor = openat(directory, name, flags | O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    while (descriptor < 0 && errno == EINTR);
    return descriptor;
}

static int
write_pages(int descriptor, const char *data, size_t size, off_t offset)
{
    size_t done = 0;
    while (done < size) {
        size_t most = size - done < MAX_WRITE ? size - done : MAX_WRITE;
        ssize_t written = pwrite(descriptor, data + done, most, offset + (off_t)done);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return errno;
        if (written < PAGE)
            return ENOSPC;
        done += (size_t)written / PAGE * PAGE; /* direct I/O continues at the start of a page */
    }
    return 0;
}

static int
write_record(int descriptor, const char *data, size_t size)
{
    size_t whole = size / PAGE * PAGE;
    int error = write_pages(descriptor, data, whole, 0);
    if (!error && whole < size) {
        /* The memory after the record may have bytes of other records, which must not get into the file. */
        char page[PAGE] __attribute__((aligned(PAGE))) = {0};
        memcpy(page, data + whole, size - whole);
        error = write_pages(descriptor, page, PAGE, (off_t)whole);
    }
    return error;
}

static int
fill(int descriptor, const Py_buffer *data, long long stamp)
{
    struct timespec time = {.tv_sec = stamp / 1000000000, .tv_nsec = stamp % 1000000000}, times[2] = {time, time};
    int error = write_record(descriptor, data->buf, (size_t)data->len);
    if (!error && futimens(descriptor, times) < 0)
        error = errno;
    if (close(descriptor) < 0 && !error && errno != EINTR)
        error = errno;
    return error;
}

static int
publish(int directory, const char *temporary, int flags, const Py_buffer *data, long long stamp, const char *folder,
        const char *name, int *created)
{
    int error = 0, target = open_folder(directory, folder);
    if (target < 0)
        return errno;
    int descriptor = create(directory, temporary, flags);
    if (descriptor < 0)
        error = errno;
    else {
        *created = 1;
        error = fill(descriptor, data, stamp);
        if (!error && renameat(directory, temporary, target, name) < 0)
            error = errno;
    }
    close(target);
    return error;
}

static PyObject *
publish_file(PyObject *module, PyObject *arguments)
{
    int directory, flags, error, created = 0;
    const char *temporary, *folder, *name;
    long long stamp;
    Py_buffer data;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "isiy*Lss", &directory, &temporary, &flags, &data, &stamp, &folder, &name))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = publish(directory, temporary, flags, &data, stamp, folder, name, &created);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return Py_BuildValue("(iN)", error, PyBool_FromLong(created));
}

static PyMethodDef methods[] = {
    {"publish_file", publish_file, METH_VARARGS, "Write and publish a file; see _publish.c."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_publish", .m_doc = "Files written without the GIL.", .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__publish(void)
{
    return PyModuleDef_Init(&definition);
}
