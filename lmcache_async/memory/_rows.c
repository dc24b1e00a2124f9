/* Copies between rows of a paged KV cache and consecutive rows of a payload, without the GIL.
 *
 *     copy(memory, starts, payload, row_bytes, to_payload, stream, digest=None)
 *     start_digest(num_bytes) -> bytearray
 *     finish_digest(digest) -> bytes
 *
 * memory      bytes, contiguous; written unless to_payload
 * starts      int64, contiguous: byte offset of each row in memory; rows with a negative offset are skipped
 * payload     len(starts) * row_bytes bytes, contiguous; written if to_payload
 * stream      bypass the CPU caches (non-temporal stores)
 * digest      updated with the copied bytes; created by start_digest for the total bytes of all calls that
 *             share it, at least 256. The row size must then be a multiple of 64 bytes, and no row may be
 *             skipped. finish_digest returns the xxh3_128 of all bytes in the order of the copies.
 *
 * ValueError is raised if the arguments do not fit together; nothing is copied then. The source must not
 * overlap the target.
 *
 * Reason for stream: an ordinary store first reads the cache line that it overwrites, a third of the memory
 * traffic of a copy, and a load of many megabytes would evict the data of the model from the caches.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_xxh3.h"

#define INTERFACE 2 /* increment with each change of the Python interface; also in copies.py */

#define LINE 64
#define AHEAD 1024 /* prefetch distance in bytes */
#define MIN_STREAM_BYTES 1024 /* for shorter runs the unaligned ends cost more than streaming saves */

#if defined(__SSE2__)
/* n must be a multiple of LINE, and `to` aligned to LINE. */
static void
stream_lines(uint8_t *to, const uint8_t *from, size_t n)
{
    for (size_t at = 0; at < n; at += LINE) {
        _mm_prefetch((const char *)(from + at + AHEAD), _MM_HINT_NTA);
        const __m128i *source = (const __m128i *)(from + at);
        __m128i *target = (__m128i *)(to + at);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
}
#endif

static void
copy_run(uint8_t *to, const uint8_t *from, size_t n, int stream)
{
#if defined(__SSE2__)
    if (stream && n >= MIN_STREAM_BYTES) {
        size_t head = (LINE - (uintptr_t)to % LINE) % LINE;
        size_t lines = (n - head) / LINE * LINE;
        memcpy(to, from, head);
        stream_lines(to + head, from + head, lines);
        memcpy(to + head + lines, from + head + lines, n - head - lines);
        return;
    }
#else
    (void)stream;
#endif
    memcpy(to, from, n);
}

static void
copy_run_digesting(uint8_t *to, const uint8_t *from, size_t n, Digest *digest, int stream)
{
    if (stream && (uintptr_t)to % 16 == 0)
        copy_digesting(to, from, n, digest, AHEAD, 1);
    else
        copy_digesting(to, from, n, digest, AHEAD, 0);
}

/* Consecutive rows of the cache are copied as one run. */
static void
copy_rows(uint8_t *memory, uint8_t *payload, const int64_t *starts, Py_ssize_t count, Py_ssize_t size,
          int to_payload, int stream, Digest *digest)
{
    Py_ssize_t first = 0;
    while (first < count) {
        Py_ssize_t last = first + 1;
        if (starts[first] >= 0) {
            while (last < count && starts[last] == starts[last - 1] + size)
                last++;
            uint8_t *place = memory + starts[first], *part = payload + first * size;
            size_t n = (size_t)((last - first) * size);
            uint8_t *to = to_payload ? part : place, *from = to_payload ? place : part;
            if (digest != NULL)
                copy_run_digesting(to, from, n, digest, stream);
            else
                copy_run(to, from, n, stream);
        }
        first = last;
    }
#if defined(__SSE2__)
    if (stream)
        _mm_sfence(); /* make the stores visible to other threads before the copy is reported as done */
#endif
}

static int
check(const Py_buffer *memory, const Py_buffer *starts, const Py_buffer *payload, Py_ssize_t size)
{
    if (starts->itemsize != sizeof(int64_t)) {
        PyErr_Format(PyExc_ValueError, "starts has items of %zd bytes, not 8", starts->itemsize);
        return -1;
    }
    Py_ssize_t count = starts->len / (Py_ssize_t)sizeof(int64_t);
    if (size <= 0 || (count > 0 && size > PY_SSIZE_T_MAX / count) || payload->len != count * size) {
        PyErr_Format(PyExc_ValueError, "a payload of %zd bytes is not %zd rows of %zd", payload->len, count, size);
        return -1;
    }
    const int64_t *places = starts->buf;
    for (Py_ssize_t row = 0; row < count; row++) {
        if (places[row] >= 0 && (size > memory->len || places[row] > memory->len - size)) {
            PyErr_Format(PyExc_ValueError, "row %zd, at %lld, ends beyond the %zd bytes of memory", row,
                         (long long)places[row], memory->len);
            return -1;
        }
    }
    return 0;
}

/* Read a digest from a buffer of start_digest; return -1 with an error set if the buffer is invalid. */
static int
read_digest(const Py_buffer *state, Digest *digest)
{
    if (state->len == sizeof *digest)
        memcpy(digest, state->buf, sizeof *digest);
    if (state->len != sizeof *digest || digest->done > digest->total) {
        PyErr_SetString(PyExc_ValueError, "expected a digest of start_digest");
        return -1;
    }
    return 0;
}

static int
check_digest(const Digest *digest, const Py_buffer *starts, const Py_buffer *payload, Py_ssize_t size)
{
    const int64_t *places = starts->buf;
    uint64_t left = (digest->total - digest->done) * STRIPE;
    if (size % STRIPE != 0 || (uint64_t)payload->len > left) {
        PyErr_Format(PyExc_ValueError, "a digest with %llu bytes left cannot include %zd bytes in rows of %zd",
                     (unsigned long long)left, payload->len, size);
        return -1;
    }
    for (Py_ssize_t row = 0; row < starts->len / (Py_ssize_t)sizeof(int64_t); row++) {
        if (places[row] < 0) {
            PyErr_Format(PyExc_ValueError, "row %zd is skipped, but a digest must include all rows", row);
            return -1;
        }
    }
    return 0;
}

static int
copy_checked(Py_buffer *memory, const Py_buffer *starts, Py_buffer *payload, Py_ssize_t size, int to_payload,
             int stream, Py_buffer *state)
{
    Digest digest, *used = state == NULL ? NULL : &digest;
    if (check(memory, starts, payload, size) < 0)
        return -1;
    if (used != NULL && (read_digest(state, used) < 0 || check_digest(used, starts, payload, size) < 0))
        return -1;
    Py_BEGIN_ALLOW_THREADS
    copy_rows(memory->buf, payload->buf, starts->buf, starts->len / (Py_ssize_t)sizeof(int64_t), size,
              to_payload, stream, used);
    Py_END_ALLOW_THREADS
    if (used != NULL)
        memcpy(state->buf, used, sizeof *used);
    return 0;
}

static PyObject *
rows_copy(PyObject *module, PyObject *arguments)
{
    PyObject *memory_object, *starts_object, *payload_object, *digest_object = Py_None;
    Py_buffer memory, starts, payload, digest;
    Py_ssize_t size;
    int to_payload, stream, error = -1;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOnpp|O:copy", &memory_object, &starts_object, &payload_object, &size,
                          &to_payload, &stream, &digest_object))
        return NULL;
    if (PyObject_GetBuffer(memory_object, &memory, to_payload ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(payload_object, &payload, to_payload ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        goto no_payload;
    if (PyObject_GetBuffer(starts_object, &starts, PyBUF_CONTIG_RO) < 0)
        goto no_starts;
    if (digest_object == Py_None) {
        error = copy_checked(&memory, &starts, &payload, size, to_payload, stream, NULL);
    } else if (PyObject_GetBuffer(digest_object, &digest, PyBUF_WRITABLE) == 0) {
        error = copy_checked(&memory, &starts, &payload, size, to_payload, stream, &digest);
        PyBuffer_Release(&digest);
    }
    PyBuffer_Release(&starts);
no_starts:
    PyBuffer_Release(&payload);
no_payload:
    PyBuffer_Release(&memory);
    return error < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
rows_start_digest(PyObject *module, PyObject *argument)
{
    Digest digest;
    Py_ssize_t num_bytes = PyLong_AsSsize_t(argument);
    (void)module;
    if (num_bytes == -1 && PyErr_Occurred())
        return NULL;
    if (num_bytes < MIN_DIGEST_BYTES || num_bytes % STRIPE != 0) {
        PyErr_Format(PyExc_ValueError, "a digest must cover a multiple of %d bytes, at least %d, not %zd", STRIPE,
                     MIN_DIGEST_BYTES, num_bytes);
        return NULL;
    }
    digest_start(&digest, (uint64_t)num_bytes);
    return PyByteArray_FromStringAndSize((const char *)&digest, sizeof digest);
}

static PyObject *
rows_finish_digest(PyObject *module, PyObject *argument)
{
    Digest digest;
    Py_buffer state;
    uint8_t result[16];
    (void)module;
    if (PyObject_GetBuffer(argument, &state, PyBUF_SIMPLE) < 0)
        return NULL;
    int error = read_digest(&state, &digest);
    PyBuffer_Release(&state);
    if (error < 0)
        return NULL;
    if (digest.done != digest.total) {
        PyErr_Format(PyExc_ValueError, "the digest is incomplete: %llu bytes are missing",
                     (unsigned long long)((digest.total - digest.done) * STRIPE));
        return NULL;
    }
    digest_finish(&digest, result);
    return PyBytes_FromStringAndSize((const char *)result, sizeof result);
}

static PyMethodDef methods[] = {
    {"copy", rows_copy, METH_VARARGS, "Copy rows between a cache and a payload; see _rows.c."},
    {"start_digest", rows_start_digest, METH_O, "Start a digest of this number of bytes; see _rows.c."},
    {"finish_digest", rows_finish_digest, METH_O, "Return the xxh3_128 of the copied bytes; see _rows.c."},
    {NULL, NULL, 0, NULL},
};

static int
add_constants(PyObject *module)
{
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_constants}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_doc = "Copies of rows without the GIL.", .m_size = 0,
    .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
