/* Copies between rows of a paged KV cache and consecutive rows of a payload, without the GIL.
 *
 *     copy(pieces, to_payload, stream, digest=False) -> bytes or None
 *     open_queue(event) -> queue
 *     submit(queue, pieces, to_payload, stream) -> number
 *     withdraw(queue, number) -> bool
 *     run(queue)
 *     finished(queue) -> list[number]
 *     close_queue(queue)
 *
 * pieces      list of tuples (memory, starts, payload, row_bytes), which are copied one after the other
 * memory      bytes, contiguous; written unless to_payload
 * starts      int64, contiguous: byte offset of each row in memory; rows with a negative offset are skipped. They are
 *             checked and used as a copy, so that no other thread and no copied row can change them in between.
 * payload     len(starts) * row_bytes bytes, contiguous; written if to_payload
 * stream      bypass the CPU caches (non-temporal stores): number of pages that are copied at the same time, or 0.
 *             STREAM_PAGES is the fastest number for this processor.
 * digest      return the xxh3_128 of the bytes of all payloads, at least 256, in their order. The row sizes must then
 *             be multiples of 64 bytes, and no row may be skipped.
 *
 * A queue has batches of copies. Threads in `run` make them without the GIL, in the order of submission.
 * When a batch has ended, 1 is added to the eventfd `event`, and `finished` returns its number and releases its buffers.
 * The queue closes `event` when it is deleted.
 * `withdraw` leaves out the pieces of a batch that no thread has begun, if there are any; the batch then ends too. `run`
 * returns when the queue is closed and empty.
 *
 * `event` must not block. Only the process that opened a queue can use it: in a forked child there are no threads, and the
 * lock may be held for ever.
 *
 * ValueError is raised if the arguments do not fit together, or a row overlaps its payload; nothing is copied then.
 *
 * Reason for stream: an ordinary store first reads the cache line that it overwrites, a third of the memory
 * traffic of a copy, and a load of many megabytes would evict the data of the model from the caches.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "_xxh3.h"

#define INTERFACE 6 /* increment with each change of the Python interface; also in copies.py */

#define LINE 64
#define AHEAD 1024 /* prefetch distance in bytes */
#define PAGE 4096
#define MAX_STREAM_PAGES 8
#define MIN_STREAM_BYTES 1024 /* for shorter runs the unaligned ends cost more than streaming saves */

#if defined(__SSE2__)
static inline void
stream_line(uint8_t *to, const uint8_t *from)
{
    const __m128i *source = (const __m128i *)from;
    __m128i *target = (__m128i *)to;
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
}

/* n must be a multiple of LINE, and `to` aligned to LINE.
 *
 * Intel's processors prefetch within pages, each page for itself. Copying several pages at the same time keeps more
 * reads in flight, as glibc does for very large copies. AMD's Zen 3 needs five times as long for such copies as for
 * consecutive lines. */
static void
stream_lines(uint8_t *to, const uint8_t *from, size_t n, size_t pages)
{
    size_t step = pages * PAGE;
    if (pages > 1 && n >= 2 * step) /* for shorter runs this is no faster */
        for (; n >= step; n -= step, to += step, from += step)
            for (size_t line = 0; line < PAGE; line += LINE)
                for (size_t at = line; at < step; at += PAGE)
                    stream_line(to + at, from + at);
    for (size_t at = 0; at < n; at += LINE) {
        _mm_prefetch((const char *)(from + at + AHEAD), _MM_HINT_NTA);
        stream_line(to + at, from + at);
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
        stream_lines(to + head, from + head, lines, (size_t)stream);
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

/* The buffers and rows of one copy. */
typedef struct {
    Py_buffer memory, payload;
    int64_t *starts;
    Py_ssize_t count, size;
} Piece;

static int
check(const Piece *piece)
{
    Py_ssize_t count = piece->count, size = piece->size, nbytes = piece->memory.len;
    if (size <= 0 || (count > 0 && size > PY_SSIZE_T_MAX / count) || piece->payload.len != count * size) {
        PyErr_Format(PyExc_ValueError, "a payload of %zd bytes is not %zd rows of %zd", piece->payload.len, count, size);
        return -1;
    }
    uintptr_t memory = (uintptr_t)piece->memory.buf, payload = (uintptr_t)piece->payload.buf;
    for (Py_ssize_t row = 0; row < count; row++) {
        int64_t start = piece->starts[row];
        if (start < 0)
            continue;
        if (size > nbytes || start > nbytes - size) {
            PyErr_Format(PyExc_ValueError, "row %zd, at %lld, ends beyond the %zd bytes of memory", row,
                         (long long)start, nbytes);
            return -1;
        }
        uintptr_t address = memory + (uintptr_t)start;
        if (address < payload + (size_t)piece->payload.len && payload < address + (size_t)size) {
            PyErr_Format(PyExc_ValueError, "row %zd, at %lld, overlaps the payload", row, (long long)start);
            return -1;
        }
    }
    return 0;
}

/* Copy the offsets of the rows; return -1 with an error set if they are not int64. */
static int
read_starts(Piece *piece, PyObject *starts)
{
    Py_buffer view;
    if (PyObject_GetBuffer(starts, &view, PyBUF_CONTIG_RO) < 0)
        return -1;
    if (view.itemsize != sizeof *piece->starts)
        PyErr_Format(PyExc_ValueError, "starts has items of %zd bytes, not 8", view.itemsize);
    else if ((piece->starts = PyMem_Malloc((size_t)view.len)) == NULL)
        PyErr_NoMemory();
    else {
        memcpy(piece->starts, view.buf, (size_t)view.len);
        piece->count = view.len / view.itemsize;
    }
    PyBuffer_Release(&view);
    return piece->starts == NULL ? -1 : 0;
}

static void
close_piece(Piece *piece)
{
    PyMem_Free(piece->starts);
    PyBuffer_Release(&piece->payload);
    PyBuffer_Release(&piece->memory);
}

/* Get the buffers of a piece and check them; return -1 with an error set, and without buffers, if they do not fit. */
static int
open_piece(Piece *piece, PyObject *memory, PyObject *starts, PyObject *payload, int to_payload)
{
    memset(&piece->payload, 0, sizeof piece->payload); /* releasing a buffer of zeros does nothing */
    piece->starts = NULL;
    if (PyObject_GetBuffer(memory, &piece->memory, to_payload ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        return -1;
    if (PyObject_GetBuffer(payload, &piece->payload, to_payload ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0 ||
        read_starts(piece, starts) < 0 || check(piece) < 0) {
        close_piece(piece);
        return -1;
    }
    return 0;
}

static void
copy_piece(const Piece *piece, int to_payload, int stream, Digest *digest)
{
    copy_rows(piece->memory.buf, piece->payload.buf, piece->starts, piece->count, piece->size, to_payload, stream,
              digest);
}

/* Open the piece of a tuple (memory, starts, payload, row_bytes). */
static int
open_tuple(Piece *piece, PyObject *tuple, int to_payload)
{
    PyObject *memory, *starts, *payload;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a piece is a tuple (memory, starts, payload, row_bytes)");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "OOOn:copy", &memory, &starts, &payload, &piece->size))
        return -1;
    return open_piece(piece, memory, starts, payload, to_payload);
}

static void
close_pieces(Piece *pieces, Py_ssize_t count)
{
    while (count > 0)
        close_piece(&pieces[--count]);
    PyMem_Free(pieces);
}

/* Open the pieces of a list of tuples. Return NULL with an error set if one does not fit. */
static Piece *
open_pieces(PyObject *list, Py_ssize_t *count, int to_payload)
{
    Py_ssize_t opened = 0;
    *count = PyList_Size(list);
    Piece *pieces = PyMem_Calloc(*count > 0 ? (size_t)*count : 1, sizeof *pieces);
    if (pieces == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    /* Getting a buffer may run Python code, which might change the list. */
    while (opened < *count && opened < PyList_Size(list)) {
        PyObject *tuple = Py_NewRef(PyList_GetItem(list, opened));
        int error = open_tuple(&pieces[opened], tuple, to_payload);
        Py_DECREF(tuple);
        if (error < 0)
            break;
        opened++;
    }
    if (opened == *count)
        return pieces;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "the list of pieces changed during the call");
    close_pieces(pieces, opened);
    return NULL;
}

/* Start a digest of the payloads of all pieces; return -1 with an error set if it cannot include one of them. */
static int
start_digest(Digest *digest, const Piece *pieces, Py_ssize_t count)
{
    uint64_t num_bytes = 0;
    for (const Piece *piece = pieces; piece < pieces + count; piece++) {
        if (piece->size % STRIPE != 0) {
            PyErr_Format(PyExc_ValueError, "a digest cannot include rows of %zd bytes", piece->size);
            return -1;
        }
        for (Py_ssize_t row = 0; row < piece->count; row++) {
            if (piece->starts[row] < 0) {
                PyErr_Format(PyExc_ValueError, "row %zd is skipped, but a digest must include all rows", row);
                return -1;
            }
        }
        num_bytes += (uint64_t)piece->payload.len;
    }
    if (num_bytes < MIN_DIGEST_BYTES) {
        PyErr_Format(PyExc_ValueError, "a digest must include at least %d bytes, not %llu", MIN_DIGEST_BYTES,
                     (unsigned long long)num_bytes);
        return -1;
    }
    digest_start(digest, num_bytes);
    return 0;
}

static int
check_stream(int stream)
{
    if (stream >= 0 && stream <= MAX_STREAM_PAGES)
        return 0;
    PyErr_Format(PyExc_ValueError, "stream is %d, expected 0 to %d pages", stream, MAX_STREAM_PAGES);
    return -1;
}

static PyObject *
rows_copy(PyObject *module, PyObject *arguments)
{
    PyObject *list, *result = NULL;
    Py_ssize_t count;
    int to_payload, stream, digests = 0;
    Digest digest;
    uint8_t value[16];
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!pi|p:copy", &PyList_Type, &list, &to_payload, &stream, &digests) ||
        check_stream(stream) < 0)
        return NULL;
    Piece *pieces = open_pieces(list, &count, to_payload);
    if (pieces == NULL)
        return NULL;
    if (!digests || start_digest(&digest, pieces, count) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < count; at++)
            copy_piece(&pieces[at], to_payload, stream, digests ? &digest : NULL);
        if (digests)
            digest_finish(&digest, value);
        Py_END_ALLOW_THREADS
        result = digests ? PyBytes_FromStringAndSize((const char *)value, sizeof value) : Py_NewRef(Py_None);
    }
    close_pieces(pieces, count);
    return result;
}

/* A batch of copies in a queue. Its pieces are taken in order, each by one thread. */
typedef struct Batch {
    struct Batch *next;
    Piece *pieces;
    Py_ssize_t count, taken, unfinished;
    long long number;
    int to_payload, stream;
} Batch;

typedef struct {
    pthread_mutex_t lock; /* guards all else */
    pthread_cond_t changed;
    Batch *first, **last; /* batches with pieces that no thread has taken, and the end of the list */
    Batch *finished;
    long long number; /* of the latest batch */
    int event, closed;
    pid_t owner; /* process of the threads */
} Queue;

static const char QUEUE[] = "lmcache_async.memory._rows.Queue";

static void
free_batch(Batch *batch)
{
    close_pieces(batch->pieces, batch->count);
    PyMem_Free(batch);
}

static void
free_queue(PyObject *capsule)
{
    Queue *queue = PyCapsule_GetPointer(capsule, QUEUE);
    Batch *batch;
    while ((batch = queue->first) != NULL) {
        queue->first = batch->next;
        free_batch(batch);
    }
    while ((batch = queue->finished) != NULL) {
        queue->finished = batch->next;
        free_batch(batch);
    }
    close(queue->event);
    /* The condition is not destroyed: in a forked child this would wait for the threads of the parent. */
    PyMem_Free(queue);
}

/* Return the queue of a capsule; NULL with an error set if it is none, or of another process. */
static Queue *
get_queue(PyObject *capsule)
{
    Queue *queue = PyCapsule_GetPointer(capsule, QUEUE);
    if (queue != NULL && queue->owner != getpid()) {
        PyErr_SetString(PyExc_RuntimeError, "the queue was opened before this process was forked");
        return NULL;
    }
    return queue;
}

static PyObject *
rows_open_queue(PyObject *module, PyObject *argument)
{
    int event, flags;
    (void)module;
    if (!PyArg_Parse(argument, "i:open_queue", &event))
        return NULL;
    if ((flags = fcntl(event, F_GETFL)) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (!(flags & O_NONBLOCK)) {
        PyErr_Format(PyExc_ValueError, "descriptor %d must not block", event);
        return NULL;
    }
    Queue *queue = PyMem_Calloc(1, sizeof *queue);
    if (queue == NULL)
        return PyErr_NoMemory();
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->changed, NULL);
    queue->last = &queue->first;
    queue->event = event;
    queue->owner = getpid();
    PyObject *capsule = PyCapsule_New(queue, QUEUE, free_queue);
    if (capsule == NULL)
        PyMem_Free(queue);
    return capsule;
}

/* The caller holds the lock. */
static void
finish(Queue *queue, Batch *batch)
{
    uint64_t one = 1;
    batch->next = queue->finished;
    queue->finished = batch;
    ssize_t written = write(queue->event, &one, sizeof one); /* fails only if the counter is at its maximum */
    (void)written;
}

/* Take a batch out of the list of those with pieces that no thread has taken. The caller holds the lock. */
static void
take_out(Queue *queue, Batch **place)
{
    Batch *batch = *place;
    *place = batch->next;
    if (queue->last == &batch->next)
        queue->last = place;
}

static PyObject *
rows_submit(PyObject *module, PyObject *arguments)
{
    PyObject *capsule, *list;
    int to_payload, stream;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO!pi:submit", &capsule, &PyList_Type, &list, &to_payload, &stream) ||
        check_stream(stream) < 0)
        return NULL;
    Queue *queue = get_queue(capsule);
    Batch *batch = queue == NULL ? NULL : PyMem_Calloc(1, sizeof *batch);
    if (batch == NULL)
        return queue == NULL ? NULL : PyErr_NoMemory();
    batch->pieces = open_pieces(list, &batch->count, to_payload);
    if (batch->pieces == NULL) {
        PyMem_Free(batch);
        return NULL;
    }
    batch->unfinished = batch->count;
    batch->to_payload = to_payload;
    batch->stream = stream;
    pthread_mutex_lock(&queue->lock);
    long long number = batch->number = ++queue->number;
    if (batch->count == 0)
        finish(queue, batch);
    else {
        *queue->last = batch;
        queue->last = &batch->next;
        pthread_cond_broadcast(&queue->changed);
    }
    pthread_mutex_unlock(&queue->lock);
    return PyLong_FromLongLong(number);
}

static PyObject *
rows_withdraw(PyObject *module, PyObject *arguments)
{
    PyObject *capsule;
    long long number;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OL:withdraw", &capsule, &number))
        return NULL;
    Queue *queue = get_queue(capsule);
    if (queue == NULL)
        return NULL;
    pthread_mutex_lock(&queue->lock);
    Batch **place = &queue->first;
    while (*place != NULL && (*place)->number != number)
        place = &(*place)->next;
    Batch *batch = *place;
    if (batch != NULL) {
        take_out(queue, place);
        batch->unfinished -= batch->count - batch->taken;
        batch->taken = batch->count;
        if (batch->unfinished == 0)
            finish(queue, batch);
    }
    pthread_mutex_unlock(&queue->lock);
    return PyBool_FromLong(batch != NULL);
}

static void
run(Queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (queue->first == NULL && !queue->closed)
            pthread_cond_wait(&queue->changed, &queue->lock);
        Batch *batch = queue->first;
        if (batch == NULL)
            break;
        Piece *piece = &batch->pieces[batch->taken++];
        if (batch->taken == batch->count)
            take_out(queue, &queue->first);
        pthread_mutex_unlock(&queue->lock);
        copy_piece(piece, batch->to_payload, batch->stream, NULL);
        pthread_mutex_lock(&queue->lock);
        if (--batch->unfinished == 0)
            finish(queue, batch);
    }
    pthread_mutex_unlock(&queue->lock);
}

static PyObject *
rows_run(PyObject *module, PyObject *capsule)
{
    (void)module;
    Queue *queue = get_queue(capsule);
    if (queue == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(queue);
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

static PyObject *
rows_finished(PyObject *module, PyObject *capsule)
{
    (void)module;
    Queue *queue = get_queue(capsule);
    PyObject *numbers = queue == NULL ? NULL : PyList_New(0);
    if (numbers == NULL)
        return NULL;
    pthread_mutex_lock(&queue->lock);
    Batch *batch = queue->finished;
    queue->finished = NULL;
    pthread_mutex_unlock(&queue->lock);
    int error = 0;
    while (batch != NULL) {
        Batch *next = batch->next;
        PyObject *number = PyLong_FromLongLong(batch->number);
        error |= number == NULL || PyList_Append(numbers, number) < 0;
        Py_XDECREF(number);
        free_batch(batch);
        batch = next;
    }
    if (error)
        Py_CLEAR(numbers);
    return numbers;
}

static PyObject *
rows_close_queue(PyObject *module, PyObject *capsule)
{
    (void)module;
    Queue *queue = PyCapsule_GetPointer(capsule, QUEUE);
    if (queue == NULL)
        return NULL;
    if (queue->owner == getpid()) { /* in a forked child there are no threads, and the lock may be held for ever */
        pthread_mutex_lock(&queue->lock);
        queue->closed = 1;
        pthread_cond_broadcast(&queue->changed);
        pthread_mutex_unlock(&queue->lock);
    }
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"copy", rows_copy, METH_VARARGS, "Copy rows between a cache and payloads; see _rows.c."},
    {"open_queue", rows_open_queue, METH_O, "Return a queue of copies; see _rows.c."},
    {"submit", rows_submit, METH_VARARGS, "Add copies to a queue; see _rows.c."},
    {"withdraw", rows_withdraw, METH_VARARGS, "Leave out copies that no thread has begun; see _rows.c."},
    {"run", rows_run, METH_O, "Copy until the queue is closed and empty; see _rows.c."},
    {"finished", rows_finished, METH_O, "Return the numbers of finished batches, once; see _rows.c."},
    {"close_queue", rows_close_queue, METH_O, "Let the threads of a queue end; see _rows.c."},
    {NULL, NULL, 0, NULL},
};

static int
add_constants(PyObject *module)
{
    int stream_pages = 1;
#if defined(__SSE2__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel"))
        stream_pages = 4;
#endif
    if (PyModule_AddIntConstant(module, "STREAM_PAGES", stream_pages) < 0)
        return -1;
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
