/* Rows of a paged KV cache to and from consecutive rows of a payload, the interpreter lock free meanwhile.
 *
 *     copy(memory, starts, payload, row_bytes, to_payload, stream)
 *
 * memory      bytes, contiguous; written unless to_payload
 * starts      int64, contiguous: the byte offset in memory of each row; a negative one is passed over
 * payload     len(starts) * row_bytes bytes, contiguous; written if to_payload
 * stream      write past the processor's caches (non-temporal stores)
 *
 * ValueError tells that something does not fit, and then nothing was copied. What is written must not
 * overlap what is read.
 *
 * Why stream: an ordinary store first reads the line that it is about to overwrite, a third of all traffic
 * of a copy; and a load of many megabytes would throw out of the caches what the model works on.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LINE 64
#define AHEAD 1024 /* bytes that are fetched before they are copied */
#define MIN_STREAM_BYTES 1024 /* shorter runs are not worth their unaligned ends */

#if defined(__SSE2__)
/* n is a multiple of LINE, and `to` is aligned to it. */
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

/* Rows that follow each other in the cache are copied as one run. */
static void
copy_rows(uint8_t *memory, uint8_t *payload, const int64_t *starts, Py_ssize_t count, Py_ssize_t size,
          int to_payload, int stream)
{
    Py_ssize_t first = 0;
    while (first < count) {
        Py_ssize_t last = first + 1;
        if (starts[first] >= 0) {
            while (last < count && starts[last] == starts[last - 1] + size)
                last++;
            uint8_t *place = memory + starts[first], *part = payload + first * size;
            size_t n = (size_t)((last - first) * size);
            if (to_payload)
                copy_run(part, place, n, stream);
            else
                copy_run(place, part, n, stream);
        }
        first = last;
    }
#if defined(__SSE2__)
    if (stream)
        _mm_sfence(); /* other threads must see these stores before whatever tells them of the copy's end */
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
            PyErr_Format(PyExc_ValueError, "row %zd, at %lld, ends behind the memory's %zd bytes", row,
                         (long long)places[row], memory->len);
            return -1;
        }
    }
    return 0;
}

static PyObject *
rows_copy(PyObject *module, PyObject *arguments)
{
    PyObject *memory_object, *starts_object, *payload_object, *result = NULL;
    Py_buffer memory, starts, payload;
    Py_ssize_t size;
    int to_payload, stream;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOnpp:copy", &memory_object, &starts_object, &payload_object, &size,
                          &to_payload, &stream))
        return NULL;
    if (PyObject_GetBuffer(memory_object, &memory, to_payload ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(payload_object, &payload, to_payload ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        goto no_payload;
    if (PyObject_GetBuffer(starts_object, &starts, PyBUF_CONTIG_RO) < 0)
        goto no_starts;
    if (check(&memory, &starts, &payload, size) == 0) {
        Py_BEGIN_ALLOW_THREADS
        copy_rows(memory.buf, payload.buf, starts.buf, starts.len / (Py_ssize_t)sizeof(int64_t), size,
                  to_payload, stream);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&starts);
no_starts:
    PyBuffer_Release(&payload);
no_payload:
    PyBuffer_Release(&memory);
    return result;
}

static PyMethodDef methods[] = {
    {"copy", rows_copy, METH_VARARGS, "Copy rows between a cache and a payload; see _rows.pyi."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_doc = "Copies of rows without the interpreter lock.", .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
